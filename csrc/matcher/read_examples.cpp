#include "op/operators.h"
#include "xsoftmax/matcher.h"

#include "table/files/regular_file.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <limits>
#include <locale>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace xsoftmax {
namespace {

using at::Tensor;

struct ExamplesHeader { int64_t examples, features, labels; };

/// The contents of a range of lines.
struct Part {
  std::vector<int64_t> feature_ends, label_ends; // one per line
  std::vector<int32_t> features, labels;
  std::vector<float> values;
  int64_t bad_line = -1; // the first bad one, counted from 0
  std::string problem;
};

bool blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

std::string quoted(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string result(1, '"');
  for (const char c : text.substr(0, 40)) {
    if (c >= ' ' && c <= '~') {
      result += c;
    } else {
      result += "\\x";
      result += kDigits[uint8_t(c) / 16];
      result += kDigits[uint8_t(c) % 16];
    }
  }
  result.append(text.size() > 40 ? "...\"" : "\"");
  return result;
}

template <typename T>
bool whole_number(std::string_view text, T& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// Reads a number. One that is too small for a double becomes 0.
bool read_number(std::string_view text, double& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc::result_out_of_range) {
    return error == std::errc() && end == text.data() + text.size();
  }
  // A stream reads an underflow as 0 and an overflow as the largest number.
  const std::string copy(text);
  std::istringstream in(copy);
  in.imbue(std::locale::classic());
  in >> number;
  return end == text.data() + text.size() && std::abs(number) < 1;
}

class LineReader {
 public:
  LineReader(const ExamplesHeader& header, Part& part) : header_(header), part_(part) {}

  /// Returns false and sets `problem` if the line is invalid.
  bool read(std::string_view line) {
    while (!line.empty() && blank(line.back())) {
      line.remove_suffix(1);
    }
    const size_t labels_end = std::min(line.find_first_of(" \t"), line.size());
    std::string_view labels = line.substr(0, labels_end);
    if (labels.find(':') != std::string_view::npos) { // no space before the first feature
      return fail("labels, then a space, then feature:value pairs", labels);
    }
    return read_labels(labels) && read_features(line.substr(labels_end));
  }

 private:
  bool fail(const std::string& expected, std::string_view got) {
    part_.problem = "expected " + expected + ", got " + quoted(got);
    return false;
  }

  bool read_labels(std::string_view text) {
    const size_t begin = part_.labels.size();
    while (!text.empty()) {
      const size_t end = std::min(text.find(','), text.size());
      int64_t label;
      if (!whole_number(text.substr(0, end), label) || label < 0 || label >= header_.labels) {
        return fail("labels in [0, " + std::to_string(header_.labels) + ")", text.substr(0, end));
      }
      part_.labels.push_back(int32_t(label));
      if (end + 1 == text.size()) {
        return fail("a label after each comma", text);
      }
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    std::sort(part_.labels.begin() + int64_t(begin), part_.labels.end());
    const auto twice =
        std::adjacent_find(part_.labels.begin() + int64_t(begin), part_.labels.end());
    if (twice != part_.labels.end()) {
      return fail("different labels", std::to_string(*twice));
    }
    part_.label_ends.push_back(int64_t(part_.labels.size()));
    return true;
  }

  bool read_features(std::string_view text) {
    int64_t before = -1;
    while (true) {
      while (!text.empty() && blank(text.front())) {
        text.remove_prefix(1);
      }
      if (text.empty()) {
        break;
      }
      const std::string_view pair =
          text.substr(0, std::min(text.find_first_of(" \t"), text.size()));
      const size_t colon = pair.find(':');
      int64_t feature;
      if (colon == std::string_view::npos || !whole_number(pair.substr(0, colon), feature)) {
        return fail("a pair as feature:value", pair);
      }
      if (feature < 0 || feature >= header_.features) {
        return fail("features in [0, " + std::to_string(header_.features) + ")", pair);
      }
      if (feature <= before) {
        return fail("features that rise, after " + std::to_string(before), pair);
      }
      std::string_view number = pair.substr(colon + 1);
      number.remove_prefix(number.size() > 1 && number[0] == '+' && number[1] != '-');
      double wide = 0; // numbers too small for a float become 0
      const bool is_number = read_number(number, wide);
      const float value = float(wide);
      if (!is_number || !std::isfinite(value)) {
        return fail("a finite value", pair);
      }
      if (value != 0) {
        part_.features.push_back(int32_t(feature));
        part_.values.push_back(value);
      }
      before = feature;
      text.remove_prefix(pair.size());
    }
    part_.feature_ends.push_back(int64_t(part_.features.size()));
    return true;
  }

  const ExamplesHeader& header_;
  Part& part_;
};

std::string whole_file(const std::string& path) {
  constexpr const char* kOp = "read_examples";
  const FileHandle file = open_regular_file(kOp, path, O_RDONLY);
  std::string text(size_t(regular_file_status(kOp, path, file.number()).st_size), '\0');
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::read(file.number(), text.data() + done, text.size() - done);
    TORCH_CHECK(count >= 0 || errno == EINTR, kOp, ": cannot read ", path, ": ", system_error());
    if (count == 0) { // the file was truncated meanwhile
      text.resize(done);
    }
    done += size_t(std::max<ssize_t>(count, 0));
  }
  return text;
}

ExamplesHeader read_header(const std::string& path, std::string_view line) {
  std::vector<int64_t> numbers;
  bool valid = true;
  for (size_t at = 0; at < line.size();) {
    const size_t end = std::min(line.find_first_of(" \t\r", at), line.size());
    if (end > at) {
      numbers.push_back(0);
      valid = valid && whole_number(line.substr(at, end - at), numbers.back());
    }
    at = end + 1;
  }
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  valid = valid && numbers.size() == 3 &&
      std::all_of(numbers.begin(), numbers.end(), [](int64_t n) { return n >= 0 && n < kLimit; });
  TORCH_CHECK_VALUE(valid, path,
                    ":1: expected a header with the numbers of examples, features and labels, got ",
                    quoted(line));
  return {numbers[0], numbers[1], numbers[2]};
}

void read_part(std::string_view text, const ExamplesHeader& header, Part& part) {
  LineReader reader(header, part);
  int64_t line = 0;
  for (size_t at = 0; at < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (!reader.read(text.substr(at, end - at))) {
      part.bad_line = line;
      return;
    }
    at = end + 1;
  }
}

template <typename T, typename Field>
Tensor concat_parts(const std::vector<Part>& parts, Field field, at::ScalarType dtype) {
  int64_t size = 0;
  for (const Part& part : parts) {
    size += int64_t((part.*field).size());
  }
  const Tensor all = at::empty({size}, dtype);
  T* to = all.mutable_data_ptr<T>();
  for (const Part& part : parts) {
    to = std::copy((part.*field).begin(), (part.*field).end(), to);
  }
  return all;
}

Tensor joined_offsets(const std::vector<Part>& parts, std::vector<int64_t> Part::* field) {
  int64_t size = 1;
  for (const Part& part : parts) {
    size += int64_t((part.*field).size());
  }
  const Tensor all = at::empty({size}, at::kLong);
  int64_t *to = all.mutable_data_ptr<int64_t>(), before = 0;
  *to++ = 0;
  for (const Part& part : parts) {
    to = std::transform((part.*field).begin(), (part.*field).end(), to,
                        [before](int64_t end) { return before + end; });
    before = to[-1];
  }
  return all;
}

} // namespace

Examples read_examples(const std::string& path) {
  const std::string whole = whole_file(path);
  const size_t first_end = std::min(whole.find('\n'), whole.size());
  const ExamplesHeader header = read_header(path, std::string_view(whole).substr(0, first_end));
  const std::string_view text =
      std::string_view(whole).substr(std::min(first_end + 1, whole.size()));

  constexpr size_t kPart = size_t(1) << 20;
  std::vector<std::string_view> pieces;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', std::min(at + kPart, text.size())), text.size());
    end = std::min(end + 1, text.size());
    pieces.push_back(text.substr(at, end - at));
    at = end;
  }
  std::vector<Part> parts(pieces.size());
  at::parallel_for(0, int64_t(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      read_part(pieces[p], header, parts[p]);
    }
  });
  int64_t line = 2;
  for (const Part& part : parts) {
    TORCH_CHECK_VALUE(part.bad_line < 0, path, ":", line + part.bad_line, ": ", part.problem);
    line += int64_t(part.label_ends.size());
  }
  TORCH_CHECK_VALUE(line - 2 == header.examples, path, ":", line - 1, ": expected ",
                    header.examples, " examples, as the header says, got ", line - 2);
  return {joined_offsets(parts, &Part::feature_ends),
          concat_parts<int32_t>(parts, &Part::features, at::kInt),
          concat_parts<float>(parts, &Part::values, at::kFloat),
          joined_offsets(parts, &Part::label_ends),
          concat_parts<int32_t>(parts, &Part::labels, at::kInt),
          header.features,
          header.labels};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "read_examples(str path) -> (Tensor offsets, Tensor features, Tensor values, Tensor "
      "label_offsets, Tensor labels, int num_features, "
      "int num_labels)",
      [](const std::string& path) {
        auto [offsets, features, values, label_offsets, labels, num_features, num_labels] =
            read_examples(path);
        return std::make_tuple(offsets, features, values, label_offsets, labels, num_features,
                               num_labels);
      });
}

} // namespace xsoftmax
