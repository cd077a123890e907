#include "table/files/draft_folder.h"

#include "table/files/paths.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <string_view>

#include <fcntl.h>
#include <stdio.h> // renameat2
#include <sys/file.h>
#include <unistd.h>

namespace xsoftmax {
namespace {

FileHandle open_folder(const std::string& path) {
  return FileHandle(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

bool lock(const FileHandle& folder) { return flock(folder.number(), LOCK_EX | LOCK_NB) == 0; }

/// Returns whether the path still names the open folder.
bool is_same_folder(const std::string& path, const FileHandle& folder) {
  struct stat named, open;
  return lstat(path.c_str(), &named) == 0 && fstat(folder.number(), &open) == 0 &&
      named.st_dev == open.st_dev && named.st_ino == open.st_ino;
}

/// Returns whether a name is that of a draft of the target: "<target>.<process>.<number>.draft",
/// optionally followed by ".old".
bool is_draft(std::string_view name, std::string_view target) {
  const auto skip = [&](std::string_view expected) {
    const bool found = name.starts_with(expected);
    name.remove_prefix(found ? expected.size() : 0);
    return found;
  };
  const auto skip_number = [&] {
    const auto end = std::find_if(name.begin(), name.end(),
                                  [](unsigned char c) { return std::isdigit(c) == 0; });
    const bool found = end != name.begin();
    name.remove_prefix(size_t(end - name.begin()));
    return found;
  };
  return skip(target) && skip(".") && skip_number() && skip(".") && skip_number() &&
      skip(".draft") && (name.empty() || name == ".old");
}

void sync_folder(const char* op, const std::string& path) {
  const FileHandle folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  TORCH_CHECK(folder.number() >= 0 && fsync(folder.number()) == 0, op, ": cannot write ",
              paths::quoted(path), ": ", system_error());
}

std::string folder_of(const std::string& path) { return paths::parent_of(paths::absolute(path)); }

} // namespace

DraftFolder::DraftFolder(const char* op, std::string target, std::vector<std::string> files)
    : op_(op), target_(std::move(target)), files_(std::move(files)), lock_(-1) {
  if (paths::exists(target_)) { // if it is missing, a draft may be the only copy: see publish()
    remove_abandoned();
  }
  for (int number = 0;; ++number) {
    path_ = target_ + "." + std::to_string(getpid()) + "." + std::to_string(number) + ".draft";
    if (mkdir(path_.c_str(), 0777) != 0) { // not mkdtemp, which gives access to the owner only
      TORCH_CHECK(errno == EEXIST, op_, ": cannot make a folder beside ", paths::quoted(target_),
                  ": ", system_error());
      continue;
    }
    lock_ = open_folder(path_);
    TORCH_CHECK(lock_.number() >= 0 || errno == ENOENT, op_, ": cannot open ", paths::quoted(path_),
                ": ", system_error());
    const bool taken = !lock(lock_) && errno == EWOULDBLOCK;
    // Otherwise another save removed it as abandoned before it was locked.
    if (!taken && is_same_folder(path_, lock_)) {
      return;
    }
  }
}

DraftFolder::~DraftFolder() {
  if (!published_ && is_same_folder(path_, lock_)) {
    paths::remove_folder(path_);
  }
}

void DraftFolder::publish(const std::function<void()>& check) {
  sync_folder(op_, path_);
  for (bool done = false; !done;) {
    check();
    done = rename_to_target();
    // The target may have appeared or disappeared in the meantime.
    const bool raced = errno == EEXIST || errno == ENOTEMPTY || errno == ENOENT;
    TORCH_CHECK(done || (raced && paths::exists(path_)), op_, ": cannot rename ",
                paths::quoted(path_), " to ", paths::quoted(target_), ": ", system_error());
  }
  published_ = true;
  // Released now, so that a save which replaces this folder at once can remove it. If that save
  // comes before this line, remove_abandoned() below finds the folder.
  lock_ = FileHandle(-1);
  sync_folder(op_, folder_of(target_));
  // The replaced folder, unless another save has removed it as abandoned.
  const FileHandle replaced = open_folder(path_);
  if (replaced.number() >= 0 && (lock(replaced) || errno != EWOULDBLOCK) &&
      is_same_folder(path_, replaced)) {
    paths::remove_folder(path_);
  }
  remove_abandoned();
}

bool DraftFolder::rename_to_target() {
  const bool target_exists = paths::exists(target_);
  const unsigned flags = target_exists ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), flags) == 0) {
    return true;
  }
  if (errno != EINVAL && errno != ENOSYS) {
    return false;
  }
  // The file system has no atomic exchange: for a moment no folder has the name.
  const std::string old = path_ + ".old";
  if (target_exists && rename(target_.c_str(), old.c_str()) != 0) {
    return false;
  }
  const bool done = rename(path_.c_str(), target_.c_str()) == 0;
  const int saved_errno = errno;
  if (target_exists && !done) {
    rename(old.c_str(), target_.c_str());
  }
  path_ = target_exists && done ? old : path_;
  errno = saved_errno;
  return done;
}

void DraftFolder::remove_abandoned() const {
  const std::string parent = folder_of(target_);
  for (const std::string& name : paths::names_in(parent).value_or(std::vector<std::string>())) {
    if (!is_draft(name, paths::name_of(target_))) {
      continue;
    }
    const std::string draft = parent + "/" + name;
    const FileHandle folder = open_folder(draft);
    if (folder.number() < 0 || !lock(folder) || !is_same_folder(draft, folder)) {
      continue;
    }
    const auto names = paths::names_in(draft);
    if (names && std::all_of(names->begin(), names->end(), [&](const std::string& file) {
          return std::find(files_.begin(), files_.end(), file) != files_.end();
        })) {
      paths::remove_folder(draft);
    }
  }
}

} // namespace xsoftmax
