#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// Tensors backed by a file: class tables that do not fit in memory, and their optimizer state.
//
// The file is in the safetensors format, so any tool can read it: 8 bytes with the length of a JSON
// header, the header, the tensors. The header is padded with spaces to the first page: tensors
// begin at byte 4,096. Its metadata hold, within the first sector, the state of the file:
//
//     "begun"    its creation was not finished
//     "dirty"    it is being written to, or its process died while it was
//     "whole"    everything written is on disk
//
// and `kind` ("table", or the optimizer that owns the state) and `table`, an identifier shared by a
// table and the states of its optimizers. Space is reserved when a file is created, so a full disk
// is an error then and not a SIGBUS at a later write. Reading zeros that were reserved but never
// written costs no I/O.
//
// A file is open either in one process that writes or in several that read (flock). A reader maps a
// private copy: what it writes stays in its memory.

namespace xsoftmax {

struct MappedTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;

  uint64_t bytes() const {
    return uint64_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  }
  bool operator==(const MappedTensor&) const = default;
};

enum class FileState { kBegun, kDirty, kWhole };

struct MappedHeader {
  FileState state;
  std::string kind, table;
  std::vector<MappedTensor> tensors;
};

class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  /// Creates a file of zeros in state "begun".
  static std::shared_ptr<MappedFile> create(const char* op, const std::string& path,
                                            MappedHeader header);
  /// Throws if a file is not the expected one. The file is then left unchanged.
  using Check = std::function<void(const MappedFile&)>;
  /// Opens an existing file. recover: also accepts a "dirty" one, which stays dirty until a flush.
  /// A file that this process already has open is shared.
  static std::shared_ptr<MappedFile> open(const char* op, const std::string& path, bool writable,
                                          bool recover, const Check& check);
  /// Returns the file that backs a tensor, or null.
  static MappedFile* of(const at::Tensor& tensor);
  static bool exists(const std::string& path);
  /// Removes a file whose creation was cut short, unless a process is still creating it. Returns
  /// whether it was removed.
  static bool remove_unfinished(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const MappedHeader& header() const { return header_; }
  bool writable() const { return writable_; }
  bool recovered() const { return recovered_; }

  /// Returns the tensors. Each keeps the file open.
  std::vector<at::Tensor> tensors();

  /// Writes past the page cache if the file system allows it (O_DIRECT). Data written once would
  /// evict pages that are in use; and large writes bring in large pages, so that the first change
  /// of a row in one would write 2 MB.
  void write(uint64_t offset, const at::Tensor& values);
  /// Marks the file and its companions as dirty, before something is written to their memory.
  void will_change();
  /// Marks this file and its companions as being written to, until end_write() of each: a flush of
  /// another thread does not mark them whole in the meantime. Returns these files.
  std::vector<std::shared_ptr<MappedFile>> begin_write();
  void end_write();
  /// Writes everything to disk, companions first, and then marks the file as whole.
  void flush();
  /// Does the same when the process ends or the last tensor is freed. If that fails, the file stays
  /// dirty. So does a recovered file that was not flushed since.
  void finish() noexcept;

  /// Adds a companion: a file that is written together with this one (optimizer state).
  void add_companion(const std::shared_ptr<MappedFile>& other);

  /// Starts to read rows of a tensor in this file, and of its companions, with many requests at
  /// once. The disk serves many in parallel; without this, page faults would fetch the rows one
  /// after the other. Skips pages that were requested recently.
  void prefetch(const at::Tensor& table, c10::ArrayRef<c10::IntArrayRef> ids);
  /// Does the same for rows [first, first + count), for sequential passes.
  void prefetch_range(const at::Tensor& table, int64_t first, int64_t count);

 private:
  MappedFile(std::string path, int handle, bool writable)
      : path_(std::move(path)), handle_(handle), writable_(writable) {}

  void lock(const char* op);
  void map(const char* op);
  void read_header(const char* op);
  void set_state(FileState state);
  void write_back(bool by_caller);
  uint64_t bytes() const;
  void check_process() const; ///< throws in a forked child, which must not write
  std::vector<std::shared_ptr<MappedFile>> companions();
  struct Rows {
    const char* begin;
    int64_t stride, bytes; ///< distance between rows, and size of a row
  };
  Rows rows_of(const at::Tensor& table) const;
  /// Returns the tensors with `count` rows.
  std::vector<Rows> rows_of(int64_t count) const;
  void read_ahead(c10::ArrayRef<Rows> tensors, c10::ArrayRef<c10::IntArrayRef> ids);
  void read_range(const Rows& rows, int64_t first, int64_t count) const;

  std::string path_;
  int handle_;
  bool writable_, recovered_ = false,
                  was_dirty_ = false; ///< it was dirty when it was opened and was not flushed since
  int64_t process_ = 0;
  char* begin_ = nullptr;
  MappedHeader header_;
  std::atomic<FileState> state_ = FileState::kBegun;
  std::mutex mutex_; ///< guards the members below, and changes of the state
  int64_t writers_ = 0;
  std::vector<std::weak_ptr<MappedFile>> companions_;
  /// Number of recently requested pages to remember: 1 GB, which memory usually still holds. A page
  /// that was evicted is read when it is used.
  static constexpr int kRecentBits = 18;
  /// Recently requested pages, a direct-mapped table indexed by a hash of the page number.
  std::unique_ptr<std::atomic<uint32_t>[]> recent_;
};

/// Marks the file of a table, if it has one, as dirty. Call it before writing to a table or to its
/// optimizer state.
inline void table_changes(const at::Tensor& table) {
  if (MappedFile* const file = MappedFile::of(table)) {
    file->will_change();
  }
}

/// Starts to read rows of a table and of its optimizer state, if they are backed by a file. Ids
/// must be in [0, N).
inline void prefetch_rows(const at::Tensor& table, c10::ArrayRef<c10::IntArrayRef> ids) {
  if (MappedFile* const file = MappedFile::of(table)) {
    file->prefetch(table, ids);
  }
}
inline void prefetch_range(const at::Tensor& table, int64_t first, int64_t count) {
  if (MappedFile* const file = MappedFile::of(table)) {
    file->prefetch_range(table, first, count);
  }
}
inline c10::IntArrayRef ids_of(const at::Tensor& ids) {
  return {ids.const_data_ptr<int64_t>(), size_t(ids.numel())};
}

} // namespace xsoftmax
