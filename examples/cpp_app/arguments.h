// Parses arguments of the form --name value, with defaults, and flags without a value. Unknown or
// malformed arguments are errors that name the argument. Also defines the main function of programs
// with such arguments.
#pragma once

#include <c10/util/Exception.h>

#include <charconv>
#include <iostream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

struct UsageError : std::runtime_error { using std::runtime_error::runtime_error; };

class Arguments {
 public:
  Arguments(int argc, char** argv, const std::set<std::string>& flags = {}) {
    for (int i = 1; i < argc; ++i) {
      std::string word = argv[i];
      if (word.rfind("--", 0) != 0) {
        positional.push_back(word);
      } else if (word == "--help") {
        help = true;
      } else if (flags.count(word.substr(2)) != 0) {
        given_.insert(word.substr(2));
      } else if (i + 1 == argc) {
        throw UsageError(word + ": expected an option of this program, and a value after it");
      } else {
        values_[word.substr(2)] = argv[++i];
      }
    }
  }

  // Returns the value of --name, or the fallback. Throws UsageError if it is below `least`.
  template <typename T>
  T number(const std::string& name, T fallback, T least) {
    static_assert(std::is_arithmetic_v<T>);
    known_.insert(name);
    auto found = values_.find(name);
    if (found == values_.end()) {
      return fallback;
    }
    const std::string& text = found->second;
    T value{};
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw UsageError("--" + name + ": expected a number, got '" + text + "'");
    }
    if (!(value >= least)) {
      throw UsageError("--" + name + ": expected " + std::to_string(least) + " or more, got " +
                       text);
    }
    return value;
  }

  bool flag(const std::string& name) const { return given_.count(name) != 0; }

  // Throws UsageError if an argument was not requested. Call it after requesting all arguments.
  void check_all_known() const {
    for (const auto& [name, value] : values_) {
      if (known_.count(name) == 0) {
        throw UsageError("unknown argument --" + name);
      }
    }
  }

  std::vector<std::string> positional;
  bool help = false;

 private:
  std::map<std::string, std::string> values_;
  std::set<std::string> known_, given_;
};

// The main function of a program. Returns exit code 2 for wrong arguments and 1 for other errors,
// and prints the reason in one line.
inline int run_program(const char* name, const char* usage, int argc, char** argv,
                       void (*run)(Arguments&), const std::set<std::string>& flags = {}) {
  try {
    Arguments arguments(argc, argv, flags);
    if (arguments.help) {
      std::cout << usage;
    } else {
      run(arguments);
    }
    return 0;
  } catch (const UsageError& error) {
    std::cerr << name << ": " << error.what() << "\nsee " << name << " --help\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << name << ": " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << "\n";
  }
  return 1;
}
