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

// Tensors whose memory is a file: class tables that memory does not hold, and what optimizers keep for them.
//
// The file is one of the safetensors format, so that everybody can read it: 8 bytes that count those of a JSON text, the text, the tensors. The text is padded
// with spaces to the first page: tensors begin at byte 4,096. Its metadata hold, in their first sector, the state of the file:
//
//     "begun"    its creation was not finished
//     "dirty"    it is written to, or its process died while it was
//     "whole"    all that was written is on the disk
//
// and `kind` ("table", or the optimizer whose state it is) and `table`, a number that a table and the states of its optimizers share. Space is reserved when
// a file is made: a full disk is an error then, not a signal at some later write. Zeros that were reserved and never written cost no reading.
//
// One process writes to a file, or several read it (flock). Reading maps a private copy: what is written to it stays in memory.

namespace xsoftmax {

struct MappedTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;

  uint64_t bytes() const { return uint64_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype); }
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
  /// A new file, of zeros, "begun".
  static std::shared_ptr<MappedFile> create(const char* op, const std::string& path, MappedHeader header);
  /// Throws where a file is not the one that is looked for, which is then left as it is.
  using Check = std::function<void(const MappedFile&)>;
  /// One that exists. recover: also a "dirty" one, which stays so until a flush. What this process has open already is shared.
  static std::shared_ptr<MappedFile> open(const char* op, const std::string& path, bool writable, bool recover, const Check& check);
  /// The file that a tensor lies in, or null.
  static MappedFile* of(const at::Tensor& tensor);
  static bool exists(const std::string& path);
  /// Removes a file whose creation was cut short, unless a process is at work on it. Returns whether it did.
  static bool remove_unfinished(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const MappedHeader& header() const { return header_; }
  bool writable() const { return writable_; }
  bool recovered() const { return recovered_; }

  /// They keep the file open.
  std::vector<at::Tensor> tensors();

  /// Writes past the memory that holds pages of files where the disk allows: what is made once would drive out what is in use, and pages that come in by large
  /// writes are large, so that the first change of a row in one writes 2 MB.
  void write(uint64_t offset, const at::Tensor& values);
  /// Before something is written to the memory of a whole file, and of those beside it.
  void will_change();
  /// This file and those beside it are being written to, each until its end_write(): a flush of another thread does not find them whole.
  std::vector<std::shared_ptr<MappedFile>> begin_write();
  void end_write();
  /// All that was written is on the disk; then it says so. Those beside it first.
  void flush();
  /// The same where a program or a tensor ends: where it fails, the file says that it is not whole. So does one that was recovered, and not flushed since.
  void finish() noexcept;

  /// A file that is written together with this one: state of an optimizer.
  void put_beside(const std::shared_ptr<MappedFile>& other);

  /// Starts to read the rows of a tensor that lies here, and of those beside it, all at once: pages that were not asked for lately. The disk works on many at a
  /// time, and the rows of a batch that nobody has touched before are otherwise waited for one after the other.
  void prefetch(const at::Tensor& table, c10::ArrayRef<c10::IntArrayRef> ids);
  /// The same for rows [first, first + count), for what goes over all of them.
  void prefetch_range(const at::Tensor& table, int64_t first, int64_t count);

 private:
  MappedFile(std::string path, int handle, bool writable) : path_(std::move(path)), handle_(handle), writable_(writable) {}

  void lock(const char* op);
  void map(const char* op);
  void read_header(const char* op);
  void set_state(FileState state);
  void write_back(bool asked);
  uint64_t bytes() const;
  void check_process() const; ///< which opened the file
  std::vector<std::shared_ptr<MappedFile>> beside();
  struct Rows {
    const char* begin;
    int64_t stride, bytes; ///< from one to the next, and of each
  };
  Rows rows_of(const at::Tensor& table) const;
  /// Those of the tensors that have as many rows.
  std::vector<Rows> rows_of(int64_t count) const;
  void read_ahead(c10::ArrayRef<Rows> tensors, c10::ArrayRef<c10::IntArrayRef> ids);
  void read_range(const Rows& rows, int64_t first, int64_t count) const;

  std::string path_;
  int handle_;
  bool writable_, recovered_ = false, torn_ = false; ///< torn: it was dirty when it was opened, and was not flushed since
  int64_t process_ = 0;
  char* begin_ = nullptr;
  MappedHeader header_;
  std::atomic<FileState> state_ = FileState::kBegun;
  std::mutex mutex_; ///< of what follows, and of changes of the state
  int64_t writers_ = 0;
  std::vector<std::weak_ptr<MappedFile>> beside_;
  std::unique_ptr<std::atomic<uint32_t>[]> recent_; ///< pages that were asked for, each at a place that its number decides
};

/// Before something is written to a table, or to what optimizers keep for it: where it lies in a file, that is no longer whole.
inline void table_changes(const at::Tensor& table) {
  if (MappedFile* const file = MappedFile::of(table)) {
    file->will_change();
  }
}

/// Starts to read rows of a table, where it lies in a file, and what is kept beside them. Ids in [0, N).
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
inline c10::IntArrayRef ids_of(const at::Tensor& ids) { return {ids.const_data_ptr<int64_t>(), size_t(ids.numel())}; }

} // namespace xsoftmax
