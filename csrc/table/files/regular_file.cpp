#include "table/files/regular_file.h"

#include <c10/util/Exception.h>

#include <algorithm>
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

bool write_all(int handle, const char* from, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t done =
        pwrite(handle, from, std::min<uint64_t>(bytes, uint64_t(1) << 30), off_t(offset));
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return false;
    }
    from += done;
    bytes -= uint64_t(done);
    offset += uint64_t(done);
  }
  return true;
}

int open_direct(int handle, const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_DIRECT | O_CLOEXEC;
  int direct = ::open(("/proc/self/fd/" + std::to_string(handle)).c_str(), kFlags);
  if (direct < 0) { // /proc may not be mounted
    direct = ::open(path.c_str(), kFlags);
  }
  struct stat known, found;
  if (direct >= 0 &&
      (fstat(handle, &known) != 0 || fstat(direct, &found) != 0 || known.st_dev != found.st_dev ||
       known.st_ino != found.st_ino)) {
    close(direct);
    return -1;
  }
  return direct;
}

} // namespace xsoftmax
