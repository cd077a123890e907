// The replacements that a wheel uses for newer system functions (cmake/old_symbols.cpp) behave like
// those functions.
#include "../../cmake/old_symbols.cpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

bool same(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) ||
      (std::isnan(a) && std::isnan(b));
}

std::vector<double> numbers() {
  std::vector<double> all{0.0,
                          -0.0,
                          1.0,
                          0.1,
                          1e-5,
                          1e5,
                          1e15,
                          1e16,
                          1e21,
                          1e22,
                          1e23,
                          123456789.0,
                          5e-324,
                          2.2250738585072014e-308,
                          std::numeric_limits<double>::max(),
                          std::numeric_limits<double>::infinity(),
                          -std::numeric_limits<double>::infinity(),
                          std::numeric_limits<double>::quiet_NaN()};
  std::mt19937_64 random(0);
  for (int i = 0; i < 20000; ++i) {
    all.push_back(std::bit_cast<double>(random())); // any bits
    all.push_back(double(int64_t(random() >> (random() % 64)))); // integers
    all.push_back(double(int64_t(random() % 100000)) / 1000 - 50); // few digits
  }
  return all;
}

std::string text_of(std::to_chars_result (*write)(char*, char*, double), double number) {
  char buffer[512];
  const auto [end, error] = write(buffer, buffer + sizeof(buffer), number);
  return error == std::errc() ? std::string(buffer, end) : "error";
}

} // namespace

TEST(OldSymbols, NumbersAreWrittenAsToCharsWritesThem) {
  for (const double number : numbers()) {
    ASSERT_EQ(text_of(&__wrap__ZSt8to_charsPcS_d, number), text_of(&std::to_chars, number));
  }
  char small[2];
  EXPECT_EQ(__wrap__ZSt8to_charsPcS_d(small, small + 2, 0.125).ec, std::errc::value_too_large);
}

TEST(OldSymbols, NumbersAreReadAsFromCharsReadsThem) {
  std::vector<std::string> texts{
      "",    "-",    "+1",       " 1",      "1 ",  "1.5x",  ".5",          "-.5",    ".",
      "5.",  "0x10", "-0x1p3",   "1e",      "1e+", "1e400", "-1e400",      "1e-400", "4e-324",
      "inf", "-INF", "infinity", "infinit", "nan", "-nan",  "NaN",         "nan(1)", "i",
      "n",   "--1",  "1e5",      "1E-5",    "1,5", "00012", "1e0000000001"};
  for (const double number : numbers()) {
    texts.push_back(text_of(&std::to_chars, number));
  }
  for (const std::string& text : texts) {
    double expected = 7, got = 7;
    const char *first = text.data(), *last = first + text.size();
    const auto wanted = std::from_chars(first, last, expected, std::chars_format::general);
    const auto found = __wrap__ZSt10from_charsPKcS0_RdSt12chars_format(first, last, got,
                                                                       std::chars_format::general);
    ASSERT_TRUE(found.ec == wanted.ec && found.ptr == wanted.ptr) << '"' << text << '"';
    ASSERT_TRUE(same(got, expected)) << '"' << text << '"';
  }
}

TEST(OldSymbols, StreamsGiveTheSameText) {
  std::ostringstream text;
  text << "a text that is longer than what a string holds in itself: " << 0.5;
  EXPECT_EQ(__wrap__ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(*text.rdbuf()),
            text.str());
  EXPECT_EQ(__wrap__ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv({}), "");
}

TEST(OldSymbols, FunctionsHaveTheSameBits) {
  for (const double x : numbers()) {
    ASSERT_TRUE(same(__wrap_exp(x), std::exp(x)) && same(__wrap_exp2(x), std::exp2(x)) &&
                same(__wrap_log(x), std::log(x)) && same(__wrap_log2(x), std::log2(x)) &&
                same(__wrap_pow(x, 0.75), std::pow(x, 0.75)))
        << x;
  }
}

TEST(OldSymbols, FilesHaveTheSameState) {
  struct stat expected{}, got{};
  ASSERT_EQ(stat("/", &expected), 0);
  ASSERT_EQ(__wrap_stat("/", &got), 0);
  EXPECT_TRUE(got.st_ino == expected.st_ino && got.st_mode == expected.st_mode &&
              got.st_size == expected.st_size);
  EXPECT_EQ(__wrap_stat("/absent", &got), -1);
  EXPECT_EQ(errno, ENOENT);
  ASSERT_EQ(fstat(0, &expected), __wrap_fstat(0, &got));
  EXPECT_TRUE(got.st_ino == expected.st_ino && got.st_mode == expected.st_mode);
}
