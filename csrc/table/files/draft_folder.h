#pragma once

#include "table/files/regular_file.h"

#include <functional>
#include <string>
#include <vector>

namespace xsoftmax {

/// A new folder next to `target` that replaces it atomically, or is removed.
///
/// Its name is "<target>.<process>.<number>.draft". Its process holds a lock (flock) on it, so the
/// next draft of this target can recognise and remove drafts left behind by killed processes. A
/// draft that another process has locked stays, and so does every draft on a file system without
/// locks.
class DraftFolder {
 public:
  /// op: prefix of error messages. files: the file names that a draft may hold; a folder with other
  /// files is never removed.
  DraftFolder(const char* op, std::string target, std::vector<std::string> files);
  ~DraftFolder();
  DraftFolder(const DraftFolder&) = delete;

  const std::string& path() const { return path_; }

  /// Renames the draft to the target, and removes the folder that had that name. Call it when all
  /// files are on disk. check: called before each attempt; throws if the target must not be
  /// replaced.
  void publish(const std::function<void()>& check);

 private:
  bool rename_to_target();
  void remove_abandoned() const;

  const char* op_;
  std::string target_, path_;
  std::vector<std::string> files_;
  FileHandle lock_;
  bool published_ = false;
};

} // namespace xsoftmax
