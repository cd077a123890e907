#include "table/files/regular_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

namespace xsoftmax {
namespace {

const char* kind_of(mode_t mode) {
  return S_ISDIR(mode) ? "a folder"
      : S_ISFIFO(mode) ? "a FIFO"
      : S_ISSOCK(mode) ? "a socket"
                       : "a device";
}

void check_regular(const char* op, const std::string& path, const struct stat& found) {
  TORCH_CHECK_VALUE(S_ISREG(found.st_mode), op, ": expected ", path, " as a file, got ",
                    kind_of(found.st_mode));
}

} // namespace

std::string system_error() { return std::strerror(errno); }

FileHandle::~FileHandle() {
  if (number_ >= 0) {
    close(number_);
  }
}

FileHandle open_regular_file(const char* op, const std::string& path, int flags) {
  struct stat found;
  if (stat(path.c_str(), &found) == 0) { // before opening, which may act on a device
    check_regular(op, path, found);
  }
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  FileHandle file(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK));
  TORCH_CHECK(file.number() >= 0, op, ": cannot open ", path, writes ? " for writing: " : ": ",
              system_error());
  regular_file_status(op, path, file.number());
  return file;
}

struct stat regular_file_status(const char* op, const std::string& path, int handle) {
  struct stat found;
  TORCH_CHECK(fstat(handle, &found) == 0, op, ": cannot read ", path, ": ", system_error());
  check_regular(op, path, found);
  return found;
}

} // namespace xsoftmax
