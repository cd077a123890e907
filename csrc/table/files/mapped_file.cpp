#include "table/files/mapped_file.h"

#include "op/checks.h"
#include "table/files/mapped_header.h"
#include "table/files/regular_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
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
struct Hold { std::shared_ptr<MappedFile> file; };
void let_go(void* hold) { delete static_cast<Hold*>(hold); }

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

// Returns the canonical path. Optimizer state is stored next to the file, even if the working
// directory changes later or the file was opened through a link.
std::string whole_path(const std::string& path) {
  std::error_code refused;
  // A path that does not exist is kept.
  const auto found =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path, refused), refused);
  return refused ? path : found.string();
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

std::shared_ptr<MappedFile> MappedFile::create(const char* op, const std::string& given_path,
                                               MappedHeader header) {
  check_path(op, given_path);
  const std::string path = whole_path(given_path);
  uint64_t total = kPage;
  for (const MappedTensor& tensor : header.tensors) {
    uint64_t size = c10::elementSize(tensor.dtype);
    for (const int64_t extent : tensor.sizes) {
      TORCH_CHECK_VALUE(extent >= 0 && !__builtin_mul_overflow(size, uint64_t(extent), &size) &&
                            size <= kMostBytes,
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
    struct stat made;
    TORCH_CHECK(fstat(handle, &made) == 0 && made.st_nlink > 0, op, ": ", path,
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
  const ssize_t got = pread(handle_, page.data(), kPage, 0);
  TORCH_CHECK(got >= 0, op, ": cannot read ", path_, ": ", system_error());
  const bool ours = got == ssize_t(kPage) && parse_header(page, header_);
  TORCH_CHECK_VALUE(ours || size == 0, op, ": expected ", path_,
                    " as a file that xs.tables made, got another one");
  TORCH_CHECK(ours && header_.state != FileState::kBegun, op, ": ", path_,
              " is not whole: its creation was not finished. Delete it, and make it anew");
  TORCH_CHECK_VALUE(size == bytes(), op, ": ", path_, " is damaged: expected ", bytes(),
                    " bytes, got ", size);
  state_ = header_.state;
}

std::shared_ptr<MappedFile> MappedFile::open(const char* op, const std::string& given_path,
                                             bool writable, bool recover, const Check& check) {
  check_path(op, given_path);
  const std::string path = whole_path(given_path);
  FileHandle opened = open_regular_file(op, path, writable ? O_RDWR : O_RDONLY);
  const struct stat found = regular_file_status(op, path, opened.number());
  std::shared_ptr<MappedFile> file(new MappedFile(path, opened.release(), writable));
  const std::lock_guard guard(OpenFiles::all().mutex);
  for (const auto& known : OpenFiles::all().alive()) {
    const struct stat other = regular_file_status(op, known->path_, known->handle_);
    if (other.st_dev == found.st_dev && other.st_ino == found.st_ino &&
        known->process_ == getpid()) {
      TORCH_CHECK(known->writable_ == writable, op, ": ", path, " is open in this process for ",
                  known->writable_ ? "writing" : "reading", " already");
      check(*known);
      return known;
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
  file->torn_ = file->header_.state == FileState::kDirty;
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
  return data.get_deleter() == &let_go ? static_cast<const Hold*>(data.get_context())->file.get()
                                       : nullptr;
}

std::vector<Tensor> MappedFile::tensors() {
  std::vector<Tensor> made;
  char* at = begin_ + kPage;
  for (const MappedTensor& tensor : header_.tensors) {
    at::DataPtr data(at, new Hold{shared_from_this()}, &let_go, at::kCPU);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.bytes(), std::move(data),
                               /*allocator=*/nullptr, /*resizable=*/false);
    made.push_back(at::empty({0}, at::TensorOptions(tensor.dtype)));
    made.back().set_(storage, 0, tensor.sizes);
    at += tensor.bytes();
  }
  return made;
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

std::vector<std::shared_ptr<MappedFile>> MappedFile::beside() {
  const std::lock_guard guard(mutex_);
  std::vector<std::shared_ptr<MappedFile>> found;
  for (const auto& other : beside_) {
    if (auto file = other.lock()) {
      found.push_back(std::move(file));
    }
  }
  return found;
}

void MappedFile::put_beside(const std::shared_ptr<MappedFile>& other) {
  const std::lock_guard guard(mutex_);
  std::erase_if(beside_,
                [&](const auto& known) { return known.expired() || known.lock() == other; });
  beside_.push_back(other);
}

void MappedFile::check_process() const {
  TORCH_CHECK(
      !writable_ || process_ == getpid(), "tables: ", path_,
      " was opened by the process that this one was forked from: only that one may write to it");
}

void MappedFile::will_change() {
  check_process();
  for (const auto& other : beside()) {
    other->will_change();
  }
  // Under the lock: a flush of another thread has either ended or will see these writes.
  const std::lock_guard guard(mutex_);
  if (writable_ && state_ == FileState::kWhole) {
    set_state(FileState::kDirty);
  }
}

std::vector<std::shared_ptr<MappedFile>> MappedFile::begin_write() {
  std::vector<std::shared_ptr<MappedFile>> files = beside();
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

void MappedFile::flush() { write_back(/*asked=*/true); }

void MappedFile::write_back(bool asked) {
  TORCH_CHECK(writable_, "tables: ", path_,
              " is open for reading: what was written to its table is in memory alone");
  check_process();
  struct stat found;
  TORCH_CHECK(fstat(handle_, &found) != 0 || found.st_nlink > 0, "tables: ", path_,
              " was deleted while it was open: its table is lost with this process");
  for (const auto& other : beside()) {
    other->write_back(asked);
  }
  const std::lock_guard guard(mutex_);
  TORCH_CHECK(msync(begin_, bytes(), MS_SYNC) == 0, "tables: cannot write ", path_, ": ",
              system_error());
  torn_ = torn_ && !asked;
  if (state_ != FileState::kWhole && !torn_ && writers_ == 0) {
    set_state(FileState::kWhole);
  }
}

void MappedFile::finish() noexcept {
  if (!writable_ || process_ != getpid() || state_ == FileState::kBegun) {
    return;
  }
  try {
    write_back(/*asked=*/false);
  } catch (const c10::Error&) { // an I/O error: the file stays dirty
  }
}

} // namespace xsoftmax
