#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <sys/stat.h>

namespace xsoftmax {

/// Returns the message of errno.
std::string system_error();

/// Owns a file descriptor and closes it in its destructor.
class FileHandle {
 public:
  explicit FileHandle(int number) : number_(number) {}
  FileHandle(FileHandle&& other) noexcept : number_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileHandle();

  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

/// Opens an existing regular file without blocking. Throws ValueError for a folder, FIFO, socket or
/// device, because opening or reading one may hang or have side effects; throws RuntimeError with
/// the system's reason if the file cannot be opened.
///
/// op: prefix of error messages. flags: of open(2); O_CLOEXEC and O_NONBLOCK are added.
FileHandle open_regular_file(const char* op, const std::string& path, int flags);

/// Returns fstat() of an open file. Throws like open_regular_file().
struct stat regular_file_status(const char* op, const std::string& path, int handle);

/// Writes all bytes. Returns false on an error, with its reason in errno.
bool write_all(int handle, const char* from, uint64_t bytes, uint64_t offset);

/// Opens a second handle of an open file, for O_DIRECT writes. Returns -1 on failure. Compares
/// inodes, because the file may have been renamed and its path may name another file by now.
int open_direct(int handle, const std::string& path);

} // namespace xsoftmax
