#include "xsoftmax/matcher.h"

#include "table/files/draft_folder.h"
#include "table/files/paths.h"
#include "table/files/regular_file.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// The folder of a model contains model.bin: a header, a table of sections, then the tensors as they
// are in memory, each at a multiple of 64 bytes: the labels, the parts of each layer, and the notes
// as bytes. All little-endian. notes.json is a human-readable copy of the notes.

namespace xsoftmax {
namespace {

static_assert(std::endian::native == std::endian::little);

using at::Tensor;

constexpr const char* kFile = "model.bin";
constexpr const char* kNotes = "notes.json";
constexpr std::array<char, 8> kMagic{'x', 's', 'X', 'R', 'L', 'i', 'n', '\n'};
constexpr uint32_t kVersion = 2, kMaxDepth = 64;
constexpr uint64_t kAlignment = 64, kLayerParts = 6;
// The file's dtype numbers are indices into this array.
constexpr std::array kDtypes{at::kLong, at::kInt, at::kByte, at::kFloat, at::kHalf};

struct FileHeader {
  std::array<char, 8> magic;
  uint32_t version, depth;
  int64_t features;
  double bias;
  std::array<char, 16> transform; // padded with zeros
  uint64_t bytes;                 // size of the file
  uint64_t checksum; // of the header with this field 0, and of the sections' checksum
};
static_assert(sizeof(FileHeader) == 64);

struct Section {
  uint64_t begin, bytes;
  uint64_t dtype;
  uint64_t checksum;
};

/// Returns the checksum of 8-byte words, the last one padded with zeros. A change of any one word
/// changes it.
uint64_t checksum(const void* from, uint64_t bytes) {
  // Four chains of products that do not wait for each other.
  std::array<uint64_t, 4> lanes{1, 2, 3, 4};
  const char* at = static_cast<const char*>(from);
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * 0x9E3779B97F4A7C15u; // an odd factor makes this one-to-one
    return lane ^ (lane >> 29);
  };
  uint64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    for (int lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, at + i + 8 * lane, 8);
      lanes[lane] = mix(lanes[lane], word);
    }
  }
  uint64_t all = bytes;
  for (const uint64_t lane : lanes) {
    all = mix(all, lane);
  }
  for (; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, at + i, std::min<uint64_t>(8, bytes - i));
    all = mix(all, word);
  }
  return all;
}

uint64_t header_checksum(FileHeader header, std::span<const Section> sections) {
  header.checksum = checksum(sections.data(), sections.size_bytes());
  return checksum(&header, sizeof(header));
}

/// A new file that is written sequentially.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path), handle_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    TORCH_CHECK(handle_.number() >= 0, "XRLinear: cannot open ", paths::quoted(path), ": ",
                system_error());
  }

  void write(const void* from, uint64_t bytes) {
    for (const char* at = static_cast<const char*>(from); bytes > 0;) {
      const ssize_t done =
          ::write(handle_.number(), at, std::min<uint64_t>(bytes, uint64_t(1) << 30));
      TORCH_CHECK(done > 0 || errno == EINTR, "XRLinear: cannot write ", paths::quoted(path_), ": ",
                  system_error());
      at += std::max<ssize_t>(done, 0);
      bytes -= uint64_t(std::max<ssize_t>(done, 0));
    }
  }

  void flush() {
    TORCH_CHECK(fsync(handle_.number()) == 0, "XRLinear: cannot write ", paths::quoted(path_), ": ",
                system_error());
  }

 private:
  std::string path_;
  FileHandle handle_;
};

/// A read-only memory mapping of a file.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const FileHandle file = open_regular_file("XRLinear", path, O_RDONLY);
    bytes_ = uint64_t(regular_file_status("XRLinear", path, file.number()).st_size);
    if (bytes_ > 0) {
      begin_ = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.number(), 0);
      TORCH_CHECK(begin_ != MAP_FAILED, "XRLinear: cannot map ", paths::quoted(path), ": ",
                  system_error());
    }
  }
  ~Mapping() {
    if (bytes_ > 0) {
      munmap(begin_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;

  const char* begin() const { return static_cast<const char*>(begin_); }
  uint64_t bytes() const { return bytes_; }

 private:
  void* begin_ = nullptr;
  uint64_t bytes_;
};

/// Returns whether the folder's file begins like that of a model.
bool holds_model(const std::string& folder) {
  const std::string path = folder + "/" + kFile;
  struct stat found;
  if (stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) {
    return false;
  }
  const FileHandle file = open_regular_file("XRLinear", path, O_RDONLY);
  std::array<char, kMagic.size()> magic{};
  return pread(file.number(), magic.data(), magic.size(), 0) == ssize_t(magic.size()) &&
      magic == kMagic;
}

/// Returns whether text is UTF-8, as Python's str and JSON require.
bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t i) {
      return at + i < text.size() ? uint8_t(text[at + i]) : uint8_t(0);
    };
    const uint8_t first = byte(0);
    const size_t size = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    // The second byte's range excludes overlong encodings, surrogates, and code points above
    // U+10FFFF.
    const uint8_t low = first == 0xE0 ? 0xA0
        : first == 0xF0               ? 0x90
                                      : 0x80,
                  high = first == 0xED ? 0x9F
        : first == 0xF4                ? 0x8F
                                       : 0xBF;
    bool valid = size == 1 || (first >= 0xC2 && first <= 0xF4 && byte(1) >= low && byte(1) <= high);
    for (size_t i = 2; i < size; ++i) {
      valid = valid && byte(i) >= 0x80 && byte(i) <= 0xBF;
    }
    if (!valid) {
      return false;
    }
    at += size;
  }
  return true;
}

/// Returns the target folder. Raises unless it does not exist or contains a model and nothing else.
std::string checked_target(const std::string& path) {
  std::string target = path;
  while (target.size() > 1 && target.ends_with('/')) { // such as "model/"
    target.pop_back();
  }
  TORCH_CHECK_VALUE(!target.empty(), "XRLinear: expected path as the name of a folder, got \"",
                    path, "\"");
  struct stat found;
  if (lstat(target.c_str(), &found) != 0) {
    return target;
  }
  TORCH_CHECK_VALUE(S_ISDIR(found.st_mode),
                    "XRLinear: expected path as a new folder or one with a model, got ",
                    paths::quoted(target), ", which is something else");
  TORCH_CHECK_VALUE(holds_model(target),
                    "XRLinear: expected path as a new folder or one with a model, got ",
                    paths::quoted(target), ", which holds none");
  const auto names = paths::names_in(target);
  TORCH_CHECK(names, "XRLinear: cannot read ", paths::quoted(target), ": ", system_error());
  for (const std::string& name : *names) {
    TORCH_CHECK_VALUE(name == kFile || name == kNotes,
                      "XRLinear: expected path as a new folder or one with a model alone, got ",
                      paths::quoted(target), ", which holds ", paths::quoted(name), " as well");
  }
  return target;
}

} // namespace

void XRLinear::check_target(const std::string& path) { checked_target(path); }

void XRLinear::save(const std::string& path, const std::string& notes) const {
  const std::string target = checked_target(path);
  std::vector<Tensor> tensors{labels_};
  for (const auto& parts : parts_) {
    tensors.insert(tensors.end(), parts.begin(), parts.end());
  }
  const std::string& notes_to_save = notes.empty() ? notes_ : notes;
  TORCH_CHECK_VALUE(is_utf8(notes_to_save), "XRLinear: expected notes in UTF-8, got other bytes");
  tensors.push_back(at::from_blob(const_cast<char*>(notes_to_save.data()),
                                  {int64_t(notes_to_save.size())}, at::TensorOptions(at::kByte)));
  std::vector<Section> sections(tensors.size());
  const auto aligned = [](uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  uint64_t end = aligned(sizeof(FileHeader) + sections.size() * sizeof(Section));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto dtype =
        std::find(kDtypes.begin(), kDtypes.end(), tensors[i].scalar_type()) - kDtypes.begin();
    sections[i] = {end, uint64_t(tensors[i].nbytes()), uint64_t(dtype),
                   checksum(tensors[i].const_data_ptr(), tensors[i].nbytes())};
    end = aligned(end + sections[i].bytes);
  }
  FileHeader header{kMagic, kVersion, uint32_t(depth()), features_, bias_, {}, end, 0};
  std::copy(transform_.begin(), transform_.end(), header.transform.begin());
  header.checksum = header_checksum(header, sections);

  DraftFolder draft("XRLinear", target, {kFile, kNotes});
  {
    NewFile file(draft.path() + "/" + kFile);
    const std::vector<char> zeros(kAlignment, 0);
    uint64_t at = 0;
    const auto write = [&](const void* from, uint64_t bytes) {
      file.write(from, bytes);
      file.write(zeros.data(), aligned(at + bytes) - (at + bytes));
      at = aligned(at + bytes);
    };
    file.write(&header, sizeof(header));
    at = sizeof(header);
    write(sections.data(), sections.size() * sizeof(Section));
    for (const Tensor& tensor : tensors) {
      write(tensor.const_data_ptr(), tensor.nbytes());
    }
    file.flush();
  }
  if (!notes_to_save.empty()) {
    NewFile file(draft.path() + "/" + kNotes);
    file.write(notes_to_save.data(), notes_to_save.size());
    file.flush();
  }
  // Check again, because the folder may have changed while gigabytes were written.
  draft.publish([&] { checked_target(path); });
}

c10::intrusive_ptr<XRLinear> XRLinear::load(const std::string& path) {
  const std::string file = path + "/" + kFile;
  const auto mapping = std::make_shared<Mapping>(file);
  const auto check_file = [&](bool condition, const auto&... message) {
    TORCH_CHECK_VALUE(condition, "XRLinear: ", paths::quoted(file), " is damaged: ", message...);
  };
  FileHeader header;
  TORCH_CHECK_VALUE(mapping->bytes() >= sizeof(header) &&
                        std::memcmp(mapping->begin(), kMagic.data(), kMagic.size()) == 0,
                    "XRLinear: expected ", paths::quoted(file),
                    " as the file of a model, got another one");
  std::memcpy(&header, mapping->begin(), sizeof(header));
  TORCH_CHECK_VALUE(header.version == kVersion, "XRLinear: expected ", paths::quoted(file),
                    " in version ", kVersion, " of the format, got ", header.version);
  check_file(header.bytes == mapping->bytes(), "expected ", header.bytes, " bytes, got ",
             mapping->bytes());
  check_file(header.depth >= 1 && header.depth <= kMaxDepth, "expected 1 to ", kMaxDepth,
             " layers, got ", header.depth);
  std::vector<Section> sections(2 + header.depth * kLayerParts);
  check_file(sizeof(header) + sections.size() * sizeof(Section) <= mapping->bytes(), "no room for ",
             sections.size(), " sections");
  std::memcpy(sections.data(), mapping->begin() + sizeof(header),
              sections.size() * sizeof(Section));
  check_file(header.checksum == header_checksum(header, sections), "wrong checksum of the header");

  std::vector<Tensor> tensors;
  for (const Section& section : sections) {
    check_file(section.begin % kAlignment == 0 && section.begin <= mapping->bytes() &&
                   section.bytes <= mapping->bytes() - section.begin,
               "a section of ", section.bytes, " bytes at ", section.begin);
    check_file(section.dtype < kDtypes.size(), "a section of dtype ", section.dtype);
    const at::ScalarType dtype = kDtypes[section.dtype];
    check_file(section.bytes % c10::elementSize(dtype) == 0, "a section of ", section.bytes,
               " bytes of ", dtype);
    const char* from = mapping->begin() + section.begin;
    check_file(section.checksum == checksum(from, section.bytes), "wrong checksum of section ",
               tensors.size());
    // The tensors must not be written to: the pages are read-only.
    tensors.push_back(at::from_blob(
        const_cast<char*>(from), {int64_t(section.bytes / c10::elementSize(dtype))},
        [mapping](void*) {}, at::TensorOptions(dtype)));
  }
  std::vector<std::vector<Tensor>> layers;
  for (size_t i = 1; i + 1 < tensors.size(); i += kLayerParts) {
    layers.emplace_back(tensors.begin() + int64_t(i), tensors.begin() + int64_t(i + kLayerParts));
  }
  const std::string transform(header.transform.begin(),
                              std::find(header.transform.begin(), header.transform.end(), '\0'));
  check_file(is_utf8(transform), "a transform that is not text");
  check_file(tensors.back().scalar_type() == at::kByte, "notes of dtype ",
             tensors.back().scalar_type());
  const std::string_view notes(static_cast<const char*>(tensors.back().const_data_ptr()),
                               tensors.back().numel());
  check_file(is_utf8(notes), "notes that are not UTF-8");
  try {
    auto model =
        c10::make_intrusive<XRLinear>(header.features, header.bias, transform, tensors[0], layers);
    model->notes_ = notes;
    return model;
  } catch (const c10::Error& error) { // of any kind if the arguments are invalid
    check_file(false, error.what_without_backtrace());
    throw;
  }
}

} // namespace xsoftmax
