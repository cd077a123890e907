#include "op/options.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <utility>

namespace xsoftmax::detail {
namespace {

// Parses `text` as a number. Returns false if it is not one, or has trailing characters.
template <typename Number>
bool read_number(std::string_view text, Number& number) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return result.ec == std::errc() && result.ptr == end;
}

template <typename Number>
std::string number_text(Number number) {
  char buffer[40];
  return {buffer, std::to_chars(buffer, buffer + sizeof(buffer), number).ptr};
}

constexpr std::pair<const char*, c10::ScalarType> kDtypes[] = {
    {"float32", c10::ScalarType::Float},
    {"float64", c10::ScalarType::Double},
    {"bfloat16", c10::ScalarType::BFloat16},
    {"float16", c10::ScalarType::Half}};

} // namespace

void OptionReader::read(bool& field) const {
  const bool yes = value_ == "true" || value_ == "True";
  if (!yes && value_ != "false" && value_ != "False") {
    refuse("true or false");
  }
  field = yes;
}

void OptionReader::read(int64_t& field) const {
  if (!read_number(value_, field)) {
    refuse("an integer");
  }
}

void OptionReader::read(double& field) const {
  if (!read_number(value_, field)) {
    refuse("a number");
  }
}

void OptionReader::read(std::string& field) const { field = value_; }

void OptionReader::read(c10::ScalarType& field) const {
  const auto* const found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                         [&](const auto& dtype) { return value_ == dtype.first; });
  if (found == std::end(kDtypes)) {
    refuse("float32, float64, bfloat16 or float16");
  }
  field = found->second;
}

void OptionReader::refuse(const char* expected) const {
  TORCH_CHECK_VALUE(false, op_, ": expected option ", key_, " as ", expected, ", got '", value_,
                    "'");
}

void OptionPrinter::add(const char* name, std::string_view value) {
  text.append(text.empty() ? "" : ",").append(name).append("=").append(value);
}

void OptionPrinter::operator()(const char* name, bool field) {
  add(name, field ? "true" : "false");
}
void OptionPrinter::operator()(const char* name, int64_t field) { add(name, number_text(field)); }
void OptionPrinter::operator()(const char* name, double field) { add(name, number_text(field)); }
void OptionPrinter::operator()(const char* name, const std::string& field) {
  TORCH_CHECK_VALUE(field.find_first_of(",=") == std::string::npos, "expected option ", name,
                    " without ',' and '=', got '", field, "'");
  add(name, field);
}

void OptionPrinter::operator()(const char* name, c10::ScalarType field) {
  const auto* const found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                         [&](const auto& dtype) { return field == dtype.second; });
  TORCH_CHECK_VALUE(found != std::end(kDtypes), "expected ", name,
                    " as float32, float64, bfloat16 or float16, got ", field);
  add(name, found->first);
}

bool next_option(const char* op, std::string_view& text, std::string_view& key,
                 std::string_view& value) {
  if (text.empty()) {
    return false;
  }
  const size_t comma = text.find(',');
  const std::string_view option = text.substr(0, comma);
  text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  const size_t equals = option.find('=');
  TORCH_CHECK_VALUE(equals != std::string_view::npos, op,
                    ": expected options as key=value,key=value, got '", option, "'");
  key = option.substr(0, equals);
  value = option.substr(equals + 1);
  return true;
}

void unknown_option(const char* op, std::string_view key, const std::string& known) {
  TORCH_CHECK_VALUE(false, op, ": expected options among ", known, ", got '", key, "'");
}

void repeated_option(const char* op, std::string_view key) {
  TORCH_CHECK_VALUE(false, op, ": expected each option once, got '", key, "' twice");
}

} // namespace xsoftmax::detail
