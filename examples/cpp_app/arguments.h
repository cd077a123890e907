// Arguments of the form --name value, with defaults, and flags without one; anything unknown or ill-formed is an error that names the argument.
// Below them the main of a program that takes such arguments.
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
        throw UsageError(word + " needs a value");
      } else {
        values_[word.substr(2)] = argv[++i];
      }
    }
  }

  // The number given as --name, or the fallback; least is the smallest that makes sense.
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
      throw UsageError("--" + name + ": expected " + std::to_string(least) + " or more, got " + text);
    }
    return value;
  }

  bool flag(const std::string& name) const { return given_.count(name) != 0; }

  // To be called once every argument has been asked for: what is left over was mistyped.
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

// The main of a program: its exit code is 2 where the arguments are wrong and 1 for any other error, with a line that says why.
inline int run_program(const char* name, const char* usage, int argc, char** argv, void (*run)(Arguments&), const std::set<std::string>& flags = {}) {
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
