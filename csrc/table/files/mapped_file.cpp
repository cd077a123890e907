#include "table/files/mapped_file.h"

#include "op/checks.h"
#include "table/files/mapped_header.h"
#include "table/files/paths.h"
#include "table/files/regular_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr uint64_t kDirectBytes = 4 << 20; // per write past the page cache

/// Registry of open files, so that opening a file twice gives the same memory, and so that all
/// files are whole after a normal exit of the process.
class OpenFiles {
 public:
  static OpenFiles& all() {
    static OpenFiles& files = *[] {
      std::atexit([] { all().flush(); });
      return new OpenFiles; // never freed: tensors of static objects may outlive it
    }();
    return files;
  }

  std::mutex mutex;
  std::vector<std::weak_ptr<MappedFile>> files;

  std::vector<std::shared_ptr<MappedFile>> alive() {
    std::erase_if(files, [](const auto& file) { return file.expired(); });
    std::vector<std::shared_ptr<MappedFile>> found;
    for (const auto& file : files) {
      if (auto locked = file.lock()) {
        found.push_back(std::move(locked));
      }
    }
    return found;
  }

 private:
  void flush() noexcept;
};

/// Context of a storage, which keeps its file open.
struct FileReference { std::shared_ptr<MappedFile> file; };
void release_file(void* reference) { delete static_cast<FileReference*>(reference); }

std::string random_name() {
  std::random_device random;
  std::string name;
  for (int i = 0; i < 16; ++i) {
    name += "0123456789abcdef"[random() % 16];
  }
  return name;
}

void check_path(const char* op, const std::string& path) {
  TORCH_CHECK_VALUE(!path.empty() && path.size() < 4096 && path.find('\0') == std::string::npos, op,
                    ": expected path as the name of a file, got one of ", path.size(), " bytes");
}

} // namespace

uint64_t MappedFile::bytes() const {
  uint64_t total = kPage;
  for (const MappedTensor& tensor : header_.tensors) {
    total += tensor.bytes();
  }
  return total;
}

bool MappedFile::remove_unfinished(const std::string& path) {
  struct stat found;
  if (lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) {
    return false;
  }
  const FileHandle file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  struct stat open;
  if (file.number() < 0 || flock(file.number(), LOCK_EX | LOCK_NB) != 0 ||
      fstat(file.number(), &open) != 0 || open.st_ino != found.st_ino) {
    return false; // another process is at work on it
  }
  std::string page(kPage, '\0');
  MappedHeader header;
  const bool begun = pread(file.number(), page.data(), kPage, 0) == ssize_t(kPage) &&
      parse_header(page, header) && header.state == FileState::kBegun;
  return (begun || open.st_size == 0) && unlink(path.c_str()) == 0;
}

bool MappedFile::exists(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0;
}

void MappedFile::lock(const char* op) {
  while (flock(handle_, (writable_ ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
    TORCH_CHECK(errno == EINTR || errno == EWOULDBLOCK, op, ": cannot lock ", path_, ": ",
                system_error());
    TORCH_CHECK(errno == EINTR, op, ": ", path_, " is in use by another process, which ",
                writable_ ? "reads or writes" : "writes to", " it");
  }
}

void MappedFile::map(const char* op) {
  void* const memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE,
                            writable_ ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE, handle_, 0);
  TORCH_CHECK(memory != MAP_FAILED, op, ": cannot map the ", bytes(), " bytes of ", path_, ": ",
              system_error());
  begin_ = static_cast<char*>(memory);
  recent_ =
      std::make_unique<std::atomic<uint32_t>[]>(size_t(1) << kRecentBits); // page 0 is the header
  process_ = getpid();
  // Rows are accessed in random order, so readahead and huge pages would read data that nobody
  // needs. If the calls fail, everything works, but slower.
  (void)madvise(begin_, bytes(), MADV_RANDOM);
  (void)madvise(begin_, bytes(), MADV_NOHUGEPAGE);
}

std::shared_ptr<MappedFile> MappedFile::create(const char* op, const std::string& path_argument,
                                               MappedHeader header) {
  check_path(op, path_argument);
  // Optimizer state is stored next to the file, even if the working directory changes later or the
  // file was opened through a link.
  const std::string path = paths::canonical(path_argument);
  uint64_t total = kPage;
  for (const MappedTensor& tensor : header.tensors) {
    uint64_t size = c10::elementSize(tensor.dtype);
    for (const int64_t extent : tensor.sizes) {
      TORCH_CHECK_VALUE(extent >= 0 && !__builtin_mul_overflow(size, uint64_t(extent), &size) &&
                            size <= kMaxBytes,
                        op, ": expected sizes of at least 0 and less than 2^62 bytes, got ",
                        tensor.sizes);
    }
    total += size;
    TORCH_CHECK_VALUE(can_be_mapped(tensor.dtype), op,
                      ": expected a table of float32, float64, bfloat16 or float16, got ",
                      check::name(tensor.dtype));
  }
  if (header.table.empty()) {
    header.table = random_name();
  }
  header.state = FileState::kBegun;
  const int handle = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  TORCH_CHECK(handle >= 0, op, ": cannot make ", path, ": ", system_error());
  std::shared_ptr<MappedFile> file(new MappedFile(path, handle, /*writable=*/true));
  try {
    file->header_ = std::move(header);
    file->lock(op);
    struct stat status;
    TORCH_CHECK(fstat(handle, &status) == 0 && status.st_nlink > 0, op, ": ", path,
                " was removed while it was made");
    file->set_state(FileState::kBegun);
    file->map(op); // before space is reserved: detects too small an address space first
    int refused = 0;
    while ((refused = posix_fallocate(handle, 0, off_t(total))) == EINTR) {
    }
    TORCH_CHECK(refused == 0, op, ": cannot reserve ", total, " bytes for ", path, ": ",
                std::strerror(refused));
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
  const std::lock_guard guard(OpenFiles::all().mutex);
  OpenFiles::all().files.push_back(file);
  return file;
}

void MappedFile::read_header(const char* op) {
  const uint64_t size = uint64_t(regular_file_status(op, path_, handle_).st_size);
  std::string page(kPage, '\0');
  const ssize_t bytes_read = pread(handle_, page.data(), kPage, 0);
  TORCH_CHECK(bytes_read >= 0, op, ": cannot read ", path_, ": ", system_error());
  const bool is_valid = bytes_read == ssize_t(kPage) && parse_header(page, header_);
  TORCH_CHECK_VALUE(is_valid || size == 0, op, ": expected ", path_,
                    " as a file that xs.tables made, got another one");
  TORCH_CHECK(is_valid && header_.state != FileState::kBegun, op, ": ", path_,
              " is not whole: its creation was not finished. Delete it, and make it anew");
  TORCH_CHECK_VALUE(size == bytes(), op, ": ", path_, " is damaged: expected ", bytes(),
                    " bytes, got ", size);
  state_ = header_.state;
}

std::shared_ptr<MappedFile> MappedFile::open(const char* op, const std::string& path_argument,
                                             bool writable, bool recover, const Check& check) {
  check_path(op, path_argument);
  const std::string path = paths::canonical(path_argument);
  FileHandle opened = open_regular_file(op, path, writable ? O_RDWR : O_RDONLY);
  const struct stat found = regular_file_status(op, path, opened.number());
  std::shared_ptr<MappedFile> file(new MappedFile(path, opened.release(), writable));
  const std::lock_guard guard(OpenFiles::all().mutex);
  for (const auto& open_file : OpenFiles::all().alive()) {
    const struct stat other = regular_file_status(op, open_file->path_, open_file->handle_);
    if (other.st_dev == found.st_dev && other.st_ino == found.st_ino &&
        open_file->process_ == getpid()) {
      TORCH_CHECK(open_file->writable_ == writable, op, ": ", path, " is open in this process for ",
                  open_file->writable_ ? "writing" : "reading", " already");
      check(*open_file);
      return open_file;
    }
  }
  file->lock(op);
  file->read_header(op);
  check(*file);
  TORCH_CHECK(file->header_.state != FileState::kDirty || recover, op, ": ", path,
              " is not whole: its process ended while it was written to. Go back to a "
              "copy, or open it with recover=True: each of its numbers is one that was written, "
              "but rows may be of different steps");
  file->recovered_ = recover;
  file->was_dirty_ = file->header_.state == FileState::kDirty;
  file->map(op);
  if (writable) { // dirty from here on, because writes to mapped memory cannot be observed
    file->set_state(FileState::kDirty);
  }
  OpenFiles::all().files.push_back(file);
  return file;
}

MappedFile::~MappedFile() {
  if (begin_ != nullptr) {
    finish();
    munmap(begin_, bytes());
  }
  if (process_ == getpid()) {
    flock(handle_, LOCK_UN); // explicitly, because a forked child may have the handle too
  }
  close(handle_);
}

void OpenFiles::flush() noexcept {
  std::vector<std::shared_ptr<MappedFile>> open;
  {
    const std::lock_guard guard(mutex);
    open = alive();
  }
  for (const auto& file : open) {
    file->finish();
  }
}

MappedFile* MappedFile::of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided ||
      !tensor.has_storage()) {
    return nullptr;
  }
  const at::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release_file
      ? static_cast<const FileReference*>(data.get_context())->file.get()
      : nullptr;
}

std::vector<Tensor> MappedFile::tensors() {
  std::vector<Tensor> result;
  char* at = begin_ + kPage;
  for (const MappedTensor& tensor : header_.tensors) {
    at::DataPtr data(at, new FileReference{shared_from_this()}, &release_file, at::kCPU);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.bytes(), std::move(data),
                               /*allocator=*/nullptr, /*resizable=*/false);
    result.push_back(at::empty({0}, at::TensorOptions(tensor.dtype)));
    result.back().set_(storage, 0, tensor.sizes);
    at += tensor.bytes();
  }
  return result;
}

void MappedFile::set_state(FileState state) {
  header_.state = state;
  const std::string page = header_text(header_);
  TORCH_CHECK(write_all(handle_, page.data(), page.size(), 0) && fdatasync(handle_) == 0,
              "tables: cannot write ", path_, ": ", system_error());
  state_ = state;
}

void MappedFile::write(uint64_t offset, const Tensor& values) {
  const char* from = static_cast<const char*>(values.const_data_ptr());
  uint64_t at = kPage + offset;
  const uint64_t end = at + values.nbytes();
  const auto copy = [&](uint64_t until) { // through the mapping, page by page: small pages
    std::memcpy(begin_ + at, from, until - at);
    from += until - at;
    at = until;
  };
  copy(std::min(end, (at + kPage - 1) / kPage * kPage));
  const int direct = open_direct(handle_, path_);
  const std::unique_ptr<void, decltype(&std::free)> buffer(std::aligned_alloc(kPage, kDirectBytes),
                                                           &std::free);
  while (direct >= 0 && buffer && end - at >= kPage) {
    const uint64_t bytes = std::min(kDirectBytes, (end - at) / kPage * kPage);
    std::memcpy(buffer.get(), from, bytes);
    if (!write_all(direct, static_cast<const char*>(buffer.get()), bytes, at)) {
      break; // falls back to the mapping, whose space is reserved
    }
    from += bytes;
    at += bytes;
  }
  if (direct >= 0) {
    close(direct);
  }
  copy(end);
}

std::vector<std::shared_ptr<MappedFile>> MappedFile::companions() {
  const std::lock_guard guard(mutex_);
  std::vector<std::shared_ptr<MappedFile>> found;
  for (const auto& other : companions_) {
    if (auto file = other.lock()) {
      found.push_back(std::move(file));
    }
  }
  return found;
}

void MappedFile::add_companion(const std::shared_ptr<MappedFile>& other) {
  const std::lock_guard guard(mutex_);
  std::erase_if(companions_,
                [&](const auto& known) { return known.expired() || known.lock() == other; });
  companions_.push_back(other);
}

void MappedFile::check_process() const {
  TORCH_CHECK(
      !writable_ || process_ == getpid(), "tables: ", path_,
      " was opened by the process that this one was forked from: only that one may write to it");
}

void MappedFile::will_change() {
  check_process();
  for (const auto& other : companions()) {
    other->will_change();
  }
  // Under the lock: a flush of another thread has either ended or will see these writes.
  const std::lock_guard guard(mutex_);
  if (writable_ && state_ == FileState::kWhole) {
    set_state(FileState::kDirty);
  }
}

std::vector<std::shared_ptr<MappedFile>> MappedFile::begin_write() {
  std::vector<std::shared_ptr<MappedFile>> files = companions();
  files.push_back(shared_from_this());
  for (const auto& file : files) {
    const std::lock_guard guard(file->mutex_);
    ++file->writers_;
  }
  return files;
}

void MappedFile::end_write() {
  const std::lock_guard guard(mutex_);
  --writers_;
}

void MappedFile::flush() { write_back(/*by_caller=*/true); }

void MappedFile::write_back(bool by_caller) {
  TORCH_CHECK(writable_, "tables: ", path_,
              " is open for reading: what was written to its table is in memory alone");
  check_process();
  struct stat found;
  TORCH_CHECK(fstat(handle_, &found) != 0 || found.st_nlink > 0, "tables: ", path_,
              " was deleted while it was open: its table is lost with this process");
  for (const auto& other : companions()) {
    other->write_back(by_caller);
  }
  const std::lock_guard guard(mutex_);
  TORCH_CHECK(msync(begin_, bytes(), MS_SYNC) == 0, "tables: cannot write ", path_, ": ",
              system_error());
  was_dirty_ = was_dirty_ && !by_caller;
  if (state_ != FileState::kWhole && !was_dirty_ && writers_ == 0) {
    set_state(FileState::kWhole);
  }
}

void MappedFile::finish() noexcept {
  if (!writable_ || process_ != getpid() || state_ == FileState::kBegun) {
    return;
  }
  try {
    write_back(/*by_caller=*/false);
  } catch (const c10::Error&) { // an I/O error: the file stays dirty
  }
}

} // namespace xsoftmax
