#pragma once

#include <cstdio>
#include <exception>
#include <functional>

// Runs checks, reports failures, and prints `N passed, N failed`.
class Checks {
 public:
  void operator()(const char* name, const std::function<bool()>& holds) {
    bool ok = false;
    try {
      ok = holds();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    if (!ok) {
      std::fprintf(stderr, "FAILED: %s\n", name);
    }
    ++(ok ? passed_ : failed_);
  }

  int report() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  int passed_ = 0, failed_ = 0;
};
