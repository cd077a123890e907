#pragma once

#include <string>
#include <utility>

#include <sys/stat.h>

namespace xsoftmax {

/// The text of errno.
std::string system_error();

/// Closes a file at the end of its life.
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

/// Opens an existing regular file and never waits. Throws ValueError for a folder, FIFO, socket or
/// device, which would hang or act when opened or read, and RuntimeError with the system's reason
/// for a file that cannot be opened.
///
/// op: begins messages. flags: of open(2); O_CLOEXEC and O_NONBLOCK are added.
FileHandle open_regular_file(const char* op, const std::string& path, int flags);

/// fstat() of an open file. Throws as open_regular_file().
struct stat regular_file_status(const char* op, const std::string& path, int handle);

} // namespace xsoftmax
