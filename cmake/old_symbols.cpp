// Bindings to old versions of functions that glibc and libstdc++ have changed since the oldest
// system that a wheel supports (see cmake/manylinux.cmake). The linker redirects calls of X to
// __wrap_X.

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#include <locale.h>
#include <pthread.h>
#include <sys/stat.h>

#if defined(__x86_64__)
#define XS_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define XS_FIRST_GLIBC "GLIBC_2.17"
#else
#error "old_symbols.cpp: expected x86_64 or aarch64"
#endif
#define XS_OLD(name, symbol, version) asm(".symver " #name ", " symbol "@" version)

namespace {

// Switches to the "C" locale, whose decimal separator is a point, during its lifetime.
class PlainLocale {
 public:
  PlainLocale() : before_(uselocale(plain())) {}
  ~PlainLocale() { uselocale(before_); }
  PlainLocale(const PlainLocale&) = delete;
  PlainLocale& operator=(const PlainLocale&) = delete;

 private:
  static locale_t plain() {
    static const locale_t made = newlocale(LC_ALL_MASK, "C", nullptr);
    return made;
  }
  locale_t before_;
};

} // namespace

extern "C" {

// The first versions also set errno, so the results are the same.
#define XS_OLD_FUNCTION(name, ...) \
  double old_##name(__VA_ARGS__);  \
  XS_OLD(old_##name, #name, XS_FIRST_GLIBC);
XS_OLD_FUNCTION(exp, double)
XS_OLD_FUNCTION(exp2, double)
XS_OLD_FUNCTION(log, double)
XS_OLD_FUNCTION(log2, double)
XS_OLD_FUNCTION(pow, double, double)
double __wrap_exp(double x) { return old_exp(x); }
double __wrap_exp2(double x) { return old_exp2(x); }
double __wrap_log(double x) { return old_log(x); }
double __wrap_log2(double x) { return old_log2(x); }
double __wrap_pow(double x, double y) { return old_pow(x, y); }

int old_trylock(pthread_mutex_t* mutex);
XS_OLD(old_trylock, "pthread_mutex_trylock", XS_FIRST_GLIBC);
int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) { return old_trylock(mutex); }

// Symbols that std::shared_mutex needs on glibc 2.28.
#define XS_OLD_LOCK(name)                    \
  int old_##name(pthread_rwlock_t*);         \
  XS_OLD(old_##name, #name, XS_FIRST_GLIBC); \
  int __wrap_##name(pthread_rwlock_t* lock) { return old_##name(lock); }
XS_OLD_LOCK(pthread_rwlock_rdlock)
XS_OLD_LOCK(pthread_rwlock_wrlock)
XS_OLD_LOCK(pthread_rwlock_unlock)

// Before glibc 2.33 these were inline functions that called a function with the version of the
// struct's layout.
#if defined(__x86_64__)
constexpr int kStatLayout = 1;
#else
constexpr int kStatLayout = 0;
#endif
int old_stat(int layout, const char* path, struct stat* found);
int old_lstat(int layout, const char* path, struct stat* found);
int old_fstat(int layout, int handle, struct stat* found);
XS_OLD(old_stat, "__xstat", XS_FIRST_GLIBC);
XS_OLD(old_lstat, "__lxstat", XS_FIRST_GLIBC);
XS_OLD(old_fstat, "__fxstat", XS_FIRST_GLIBC);
int __wrap_stat(const char* path, struct stat* found) { return old_stat(kStatLayout, path, found); }
int __wrap_lstat(const char* path, struct stat* found) {
  return old_lstat(kStatLayout, path, found);
}
int __wrap_fstat(int handle, struct stat* found) { return old_fstat(kStatLayout, handle, found); }

// std::condition_variable::wait(std::unique_lock<std::mutex>&)
void old_wait(void* condition, void* lock);
XS_OLD(old_wait, "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* condition, void* lock) {
  old_wait(condition, lock);
}

// std::stringbuf::str() const&; before C++20 it had no &.
std::string old_str(const std::stringbuf& buffer);
XS_OLD(old_str, "_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv",
       "GLIBCXX_3.4.21");
std::string __wrap__ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(
    const std::stringbuf& buffer) {
  return old_str(buffer);
}

// std::to_chars(char*, char*, double): writes the fewest digits that read as the same number, and
// no exponent unless that is shorter.
std::to_chars_result __wrap__ZSt8to_charsPcS_d(char* first, char* last, double number) {
  char scientific[32], fixed[512];
  int length = 0;
  if (!std::isfinite(number)) {
    length = std::snprintf(fixed, sizeof(fixed), "%f", number);
  } else {
    const PlainLocale locale;
    int digits = 0;
    do {
      std::snprintf(scientific, sizeof(scientific), "%.*e", digits++, number);
    } while (digits < 17 && std::strtod(scientific, nullptr) != number);
    const int exponent = std::atoi(std::strchr(scientific, 'e') + 1);
    length =
        std::snprintf(fixed, sizeof(fixed), "%.*f", std::max(0, digits - 1 - exponent), number);
    if (length > int(std::strlen(scientific))) {
      length = std::snprintf(fixed, sizeof(fixed), "%s", scientific);
    }
  }
  if (length > last - first) {
    return {last, std::errc::value_too_large};
  }
  std::memcpy(first, fixed, size_t(length));
  return {first + length, std::errc()};
}

// std::from_chars(const char*, const char*, double&, std::chars_format::general). Unlike it, strtod
// also accepts leading spaces, a plus sign and hexadecimal digits, so these are rejected here.
std::from_chars_result __wrap__ZSt10from_charsPKcS0_RdSt12chars_format(const char* first,
                                                                       const char* last,
                                                                       double& number,
                                                                       std::chars_format) {
  std::string text(first, last);
  const size_t sign = text.starts_with('-');
  const bool begins = text.size() > sign && std::strchr("0123456789.iInN", text[sign]) != nullptr;
  if (text.size() > sign + 1 && (text[sign + 1] | 0x20) == 'x') {
    text.resize(sign + 1);
  }
  const PlainLocale locale;
  char* end = nullptr;
  errno = 0;
  const double found = begins ? std::strtod(text.c_str(), &end) : 0;
  if (!begins || end == text.c_str()) {
    return {first, std::errc::invalid_argument};
  }
  const char* const stop = first + (end - text.c_str());
  if (errno == ERANGE && (found == 0 || std::isinf(found))) {
    return {stop, std::errc::result_out_of_range};
  }
  number = found;
  return {stop, std::errc()};
}

// Read by std::shared_ptr: true would allow counting without atomic instructions. Always false
// here.
char __libc_single_threaded = 0;

} // extern "C"
