#pragma once

#include <optional>
#include <string>
#include <vector>

// Paths by system calls. std::filesystem is not used: builds of torch export its symbols from
// another release of GCC, to which the loader would bind this library's calls.
namespace xsoftmax::paths {

/// Returns a path from the root, which need not exist.
std::string absolute(const std::string& path);

/// Returns the path without links, "." and "..", of which the last name need not exist. If that
/// fails, returns the path as it is.
std::string canonical(const std::string& path);

/// Returns the last name of a path, and the path without it.
std::string name_of(const std::string& path);
std::string parent_of(const std::string& path);

/// Returns whether the path leads to something, through links.
bool exists(const std::string& path);

/// Returns the names in a folder except "." and "..", or nothing if it cannot be read.
std::optional<std::vector<std::string>> names_in(const std::string& folder);

/// Removes a file, or a folder with its files. Ignores errors.
void remove_file(const std::string& path);
void remove_folder(const std::string& path);

/// Returns the path as messages show it.
std::string quoted(const std::string& path);

} // namespace xsoftmax::paths
