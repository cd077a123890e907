#include "table/files/paths.h"

#include <cstdlib>
#include <memory>

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

namespace xsoftmax::paths {

namespace {

struct Free {
  void operator()(char* text) const { std::free(text); }
};
struct Close {
  void operator()(DIR* folder) const { closedir(folder); }
};

std::optional<std::string> real_path(const std::string& path) {
  const std::unique_ptr<char, Free> found(realpath(path.c_str(), nullptr));
  return found == nullptr ? std::nullopt : std::optional<std::string>(found.get());
}

} // namespace

std::string absolute(const std::string& path) {
  if (path.starts_with('/')) {
    return path;
  }
  const std::unique_ptr<char, Free> folder(getcwd(nullptr, 0));
  return folder == nullptr ? path : std::string(folder.get()) + "/" + path;
}

std::string canonical(const std::string& path) {
  if (const auto found = real_path(path)) {
    return *found;
  }
  const std::string whole = absolute(path);
  const auto folder = real_path(parent_of(whole));
  return folder ? (*folder == "/" ? "" : *folder) + "/" + name_of(whole) : path;
}

std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

bool exists(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0;
}

std::optional<std::vector<std::string>> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, Close> open(opendir(folder.c_str()));
  if (open == nullptr) {
    return std::nullopt;
  }
  std::vector<std::string> names;
  while (const dirent* entry = readdir(open.get())) {
    if (const std::string name = entry->d_name; name != "." && name != "..") {
      names.push_back(name);
    }
  }
  return names;
}

void remove_file(const std::string& path) { (void)unlink(path.c_str()); }

void remove_folder(const std::string& path) {
  for (const std::string& name : names_in(path).value_or(std::vector<std::string>())) {
    remove_file(path + "/" + name);
  }
  (void)rmdir(path.c_str());
}

std::string quoted(const std::string& path) { return "\"" + path + "\""; }

} // namespace xsoftmax::paths
