#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

// Options of an operator: a documented struct with defaults, passed to the operator as a string
// such as "lr=0.001,nesterov=true". The struct lists its fields once, in a visitor used for both
// parsing and printing:
//
//     struct RowAdamOptions {
//       double lr = 1e-3;            ///< learning rate
//       bool maximize = false;
//       template <typename Visitor>
//       void visit(Visitor& v) { v("lr", lr); v("maximize", maximize); }
//     };
//
// A field is a bool ("true", "false", "True", "False"), int64_t, double (printed as the shortest
// text that parses to the same number; "inf" and "nan" are valid), std::string (without ',' and
// '='), c10::ScalarType ("float32", "float64", "bfloat16", "float16"), or a std::optional of one of
// these ("none": no value). A missing key keeps its default. An unknown key, a repeated key and a
// value that does not parse as its field's type raise ValueError.

namespace xsoftmax {

namespace detail {

/// Parses the value of one key into the field of that name. Structs have at most 64 fields.
class OptionReader {
 public:
  OptionReader(const char* op, std::string_view key, std::string_view value)
      : op_(op), key_(key), value_(value) {}

  template <typename Field>
  void operator()(const char* name, Field& field) {
    if (found_index_ < 0 && key_ == name) {
      found_index_ = index_;
      read(field);
    }
    ++index_;
  }
  /// Returns the position of the field that was read, or -1 if no field has that name.
  int found() const { return found_index_; }

 private:
  void read(bool& field) const;
  void read(int64_t& field) const;
  void read(double& field) const;
  void read(std::string& field) const;
  void read(c10::ScalarType& field) const;
  template <typename Field>
  void read(std::optional<Field>& field) const {
    field.reset();
    if (value_ != "none") {
      read(field.emplace());
    }
  }
  [[noreturn]] void refuse(const char* expected) const;

  const char* op_;
  std::string_view key_, value_;
  int index_ = 0, found_index_ = -1;
};

class OptionPrinter {
 public:
  void operator()(const char* name, bool field);
  void operator()(const char* name, int64_t field);
  void operator()(const char* name, double field);
  void operator()(const char* name, const std::string& field);
  void operator()(const char* name, c10::ScalarType field);
  template <typename Field>
  void operator()(const char* name, const std::optional<Field>& field) {
    field.has_value() ? (*this)(name, *field) : add(name, "none");
  }
  std::string text;

 private:
  void add(const char* name, std::string_view value);
};

struct OptionNames {
  template <typename Field>
  void operator()(const char* name, Field&) {
    names.append(names.empty() ? "" : ", ").append(name);
  }
  std::string names;
};

/// Removes "key=value," from the front of `text`. Returns false if `text` is empty.
bool next_option(const char* op, std::string_view& text, std::string_view& key,
                 std::string_view& value);
[[noreturn]] void unknown_option(const char* op, std::string_view key, const std::string& known);
[[noreturn]] void repeated_option(const char* op, std::string_view key);

/// Caches parsed values by their text. Modules pass the same text in every step, so each text is
/// parsed once per thread.
template <typename Value>
class TextCache {
 public:
  /// Returns the cached value of `text`, or calls read() and caches the result.
  template <typename Read>
  const Value& of(std::string_view text, const Read& read) {
    const auto found = values_.find(text);
    if (found != values_.end()) {
      return found->second;
    }
    Value value = read();
    // A text with a scheduled learning rate is new in every step.
    if (values_.size() >= kMaxEntries) {
      values_.clear();
    }
    return values_.emplace(text, std::move(value)).first->second;
  }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  static constexpr size_t kMaxEntries = 1024;
  std::unordered_map<std::string, Value, Hash, std::equal_to<>> values_;
};

template <typename Options>
Options read_options(const char* op, std::string_view text) {
  Options options;
  uint64_t seen = 0;
  std::string_view key, value;
  while (next_option(op, text, key, value)) {
    OptionReader reader(op, key, value);
    options.visit(reader);
    if (reader.found() < 0) {
      OptionNames known;
      options.visit(known);
      unknown_option(op, key, known.names);
    }
    const uint64_t bit = uint64_t(1) << reader.found();
    if (seen & bit) {
      repeated_option(op, key);
    }
    seen |= bit;
  }
  return options;
}

} // namespace detail

/// Parses `text` into options. Error messages begin with `op`.
template <typename Options>
Options parse_options(const char* op, std::string_view text) {
  static thread_local detail::TextCache<Options> cache;
  return cache.of(text, [&] { return detail::read_options<Options>(op, text); });
}

/// Prints all fields as text that parse_options reads back exactly.
template <typename Options>
std::string print_options(Options options) {
  detail::OptionPrinter printer;
  options.visit(printer);
  return printer.text;
}

/// Returns print_options(options), and caches the last result of the thread: most steps use the
/// options of the step before, and comparing is cheaper than printing.
template <typename Options>
std::string text_of(const Options& options) {
  static thread_local std::optional<Options> last;
  static thread_local std::string text;
  if (!last.has_value() || !(*last == options)) {
    text = print_options(options);
    last = options;
  }
  return text;
}

} // namespace xsoftmax
