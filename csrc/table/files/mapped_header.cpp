#include "table/files/mapped_header.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string_view>

// Writes and parses the header of a mapped file.

namespace xsoftmax {
namespace {

// All of one length, so that a change of state moves nothing else in the header.
constexpr std::array kStates{"begun", "dirty", "whole"};
constexpr const char* kVersion = "1"; // of the metadata

struct NamedType {
  const char* name;
  at::ScalarType dtype;
};
constexpr std::array kTypes{NamedType{"F64", at::kDouble}, NamedType{"F32", at::kFloat},
                            NamedType{"F16", at::kHalf},   NamedType{"BF16", at::kBFloat16},
                            NamedType{"I64", at::kLong},   NamedType{"I32", at::kInt}};

const NamedType* find_type(at::ScalarType dtype) {
  return std::find_if(kTypes.begin(), kTypes.end(),
                      [&](const NamedType& known) { return known.dtype == dtype; });
}

/// Parses without checking offsets and padding.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : remaining_(text) {}

  bool read(MappedHeader& header) {
    std::string state;
    if (remaining_.size() != kPage || !skip_length() || !skip(R"({"__metadata__":{"state":)") ||
        !word(state) || !skip(R"(,"format":"pt","xsoftmax":"1","kind":)") || !word(header.kind) ||
        !skip(R"(,"table":)") || !word(header.table) || !skip("}")) {
      return false;
    }
    const auto* const known = std::find(kStates.begin(), kStates.end(), state);
    if (known == kStates.end()) {
      return false;
    }
    header.state = FileState(known - kStates.begin());
    uint64_t total = 0;
    while (skip(",")) {
      header.tensors.emplace_back();
      if (!tensor(header.tensors.back()) || (total += header.tensors.back().bytes()) > kMaxBytes) {
        return false;
      }
    }
    return skip("}");
  }

 private:
  bool skip_length() {
    remaining_.remove_prefix(8);
    return true;
  }
  bool skip(std::string_view expected) {
    const bool found = remaining_.starts_with(expected);
    remaining_.remove_prefix(found ? expected.size() : 0);
    return found;
  }
  bool word(std::string& to) {
    const size_t end =
        remaining_.starts_with('"') ? remaining_.find('"', 1) : std::string_view::npos;
    const auto is_plain = [](char c) { return c >= ' ' && c <= '~'; }; // error messages quote it
    if (end == std::string_view::npos || end > 64 ||
        !std::all_of(remaining_.begin(), remaining_.begin() + end, is_plain)) {
      return false;
    }
    to = remaining_.substr(1, end - 1);
    remaining_.remove_prefix(end + 1);
    return true;
  }
  bool number(int64_t& to) {
    const auto [end, error] =
        std::from_chars(remaining_.data(), remaining_.data() + remaining_.size(), to);
    if (error != std::errc() || to < 0 || uint64_t(to) > kMaxBytes) {
      return false;
    }
    remaining_.remove_prefix(size_t(end - remaining_.data()));
    return true;
  }
  bool tensor(MappedTensor& to) {
    std::string type;
    if (!word(to.name) || !skip(R"(:{"dtype":)") || !word(type) || !skip(R"(,"shape":[)")) {
      return false;
    }
    const auto* const known = std::find_if(
        kTypes.begin(), kTypes.end(), [&](const NamedType& each) { return type == each.name; });
    if (known == kTypes.end()) {
      return false;
    }
    to.dtype = known->dtype;
    uint64_t bytes = c10::elementSize(to.dtype);
    while (!skip("]")) {
      int64_t size = 0;
      const bool read = (to.sizes.empty() || skip(",")) && number(size) && to.sizes.size() <= 8;
      if (!read || __builtin_mul_overflow(bytes, uint64_t(size), &bytes) || bytes > kMaxBytes) {
        return false;
      }
      to.sizes.push_back(size);
    }
    int64_t begin = 0, end = 0; // parse_header() checks them by writing the header again
    return skip(R"(,"data_offsets":[)") && number(begin) && skip(",") && number(end) && skip("]}");
  }

  std::string_view remaining_;
};

} // namespace

bool can_be_mapped(at::ScalarType dtype) { return find_type(dtype) != kTypes.end(); }

std::string header_text(const MappedHeader& header) {
  std::string text = std::string(R"({"__metadata__":{"state":")") + kStates[size_t(header.state)] +
      R"(","format":"pt","xsoftmax":")" + kVersion + R"(","kind":")" + header.kind +
      R"(","table":")" + header.table + R"("})";
  uint64_t begin = 0;
  for (const MappedTensor& tensor : header.tensors) {
    text +=
        ",\"" + tensor.name + R"(":{"dtype":")" + find_type(tensor.dtype)->name + R"(","shape":[)";
    for (size_t axis = 0; axis < tensor.sizes.size(); ++axis) {
      text += (axis > 0 ? "," : "") + std::to_string(tensor.sizes[axis]);
    }
    text += R"(],"data_offsets":[)" + std::to_string(begin) + "," +
        std::to_string(begin + tensor.bytes()) + "]}";
    begin += tensor.bytes();
  }
  text += '}';
  std::string page(8, '\0');
  const uint64_t length = kPage - 8;
  std::memcpy(page.data(), &length, 8);
  page += text;
  page.resize(kPage, ' ');
  return page;
}

bool parse_header(const std::string& page, MappedHeader& header) {
  return HeaderReader(page).read(header) && header_text(header) == page;
}

} // namespace xsoftmax
