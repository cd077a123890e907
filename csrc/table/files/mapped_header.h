#pragma once

#include "table/files/mapped_file.h"

#include <cstdint>
#include <string>

// The first page of a mapped file, which is its header as text (format: mapped_file.h).

namespace xsoftmax {

constexpr uint64_t kPage = 4096, kMaxBytes = uint64_t(1) << 62;

/// Returns whether a file can hold tensors of this dtype.
bool can_be_mapped(at::ScalarType dtype);

/// Returns the first page of a file.
std::string header_text(const MappedHeader& header);

/// Parses the output of header_text(), and nothing else. Returns whether `page` is one.
bool parse_header(const std::string& page, MappedHeader& header);

} // namespace xsoftmax
