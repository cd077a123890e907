#pragma once

#include "core/regular_file.h"

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace xsoftmax {

/// A new folder beside `target` that becomes it as a whole, or is removed.
///
/// Its name is "<target>.<process>.<number>.draft". A lock (flock) on it lasts as long as its
/// process, so the next draft of this target can tell and remove those that killed processes left.
/// A draft that another process holds stays, and so does every draft on a file system without locks.
class DraftFolder {
 public:
  /// op: begins messages. files: the names that a draft may hold; a folder with others is not removed.
  DraftFolder(const char* op, std::filesystem::path target, std::vector<std::string> files);
  ~DraftFolder();
  DraftFolder(const DraftFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Renames the draft to the target. A folder of that name changes places with it and is removed.
  /// Call it when all files are on the disk. check: called before each attempt; throws where the
  /// target is not to be replaced.
  void publish(const std::function<void()>& check);

 private:
  bool rename_to_target();
  void remove_abandoned() const;

  const char* op_;
  std::filesystem::path target_, path_;
  std::vector<std::string> files_;
  FileHandle lock_;
  bool published_ = false;
};

} // namespace xsoftmax
