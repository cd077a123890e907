// Answers queries with a model exported from Python and compiled with AOTInductor: one line per
// query, one line per answer, without Python.

#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>

#include "arguments.h"

namespace {

constexpr const char* kUsage =
    "usage: serve MODEL.pt2 [QUERIES] [--batch 1] [--threads 1]\n"
    "  MODEL.pt2  a package made by torch._inductor.aoti_compile_and_package, with input float32 "
    "[Q, D], outputs log-probabilities and ids [Q, k], and D in its metadata\n"
    "  QUERIES    a file with one query per line, D numbers separated by spaces; default: standard "
    "input\n"
    "  --batch    how many queries are answered at once\n"
    "An answer is a line of id:log-probability, best first. Latencies go to standard error.\n";

struct Options {
  std::string model, queries;
  int64_t batch;
  int threads;
};

Options parse(Arguments& arguments) {
  Options options;
  options.batch = arguments.number<int64_t>("batch", 1, 1);
  options.threads = arguments.number<int>("threads", 1, 1);
  arguments.check_all_known();
  if (arguments.positional.empty() || arguments.positional.size() > 2) {
    throw UsageError("expected a package and at most one file of queries, got " +
                     std::to_string(arguments.positional.size()) + " arguments");
  }
  options.model = arguments.positional[0];
  options.queries = arguments.positional.size() == 2 ? arguments.positional[1] : "";
  for (const std::string& path : {options.model, options.queries}) {
    if (!path.empty() && !std::ifstream(path)) {
      throw UsageError("cannot read " + path);
    }
  }
  return options;
}

// Appends the numbers of a line to `numbers`.
void read_query(const std::string& line, int64_t number, std::vector<float>& numbers) {
  const char *at = line.data(), *end = at + line.size();
  while (true) {
    at = std::find_if(at, end, [](char c) { return c != ' ' && c != '\t' && c != '\r'; });
    if (at == end) {
      return;
    }
    float value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc()) {
      throw UsageError("line " + std::to_string(number) + ": expected numbers, got '" +
                       std::string(at, std::find(at, end, ' ')) + "'");
    }
    numbers.push_back(value);
    at = next;
  }
}

// Reads the next queries, [up to count, width]; empty at the end.
torch::Tensor read_queries(std::istream& in, int64_t count, int64_t width, int64_t& line_number) {
  std::vector<float> numbers;
  int64_t queries = 0;
  for (std::string line; queries < count && std::getline(in, line); ++queries) {
    const size_t before = numbers.size();
    read_query(line, ++line_number, numbers);
    if (numbers.size() - before != static_cast<size_t>(width)) {
      const std::string got = std::to_string(numbers.size() - before);
      throw UsageError("line " + std::to_string(line_number) + ": expected " +
                       std::to_string(width) + " numbers, got " + got);
    }
  }
  return torch::tensor(numbers).reshape({queries, width});
}

// Returns the width of a query. It must be checked here, because a package does not check its
// input: it would read past the end of a narrower query.
int64_t width_of(torch::inductor::AOTIModelPackageLoader& model, const std::string& path) {
  const auto metadata = model.get_metadata();
  const auto found = metadata.find("width");
  int64_t width = 0;
  if (found != metadata.end()) {
    std::from_chars(found->second.data(), found->second.data() + found->second.size(), width);
  }
  if (width < 1) {
    throw UsageError(path +
                     ": expected the width of a query in the package's metadata, as "
                     "`\"aot_inductor.metadata\": {\"width\": \"64\"}` puts it there, got " +
                     (found == metadata.end() ? "none" : "'" + found->second + "'"));
  }
  return width;
}

void check_answers(const std::vector<torch::Tensor>& answers, const std::string& path) {
  if (answers.size() != 2 || answers[0].dim() != 2 || answers[0].scalar_type() != torch::kFloat ||
      answers[1].sizes() != answers[0].sizes() || answers[1].scalar_type() != torch::kLong) {
    throw UsageError(
        path +
        ": expected a model that returns log-probabilities and ids, float32 and int64 [Q, k]");
  }
}

void print_answers(const torch::Tensor& log_probs, const torch::Tensor& ids) {
  const auto log_prob = log_probs.accessor<float, 2>();
  const auto id = ids.accessor<int64_t, 2>();
  for (int64_t q = 0; q < ids.size(0); ++q) {
    for (int64_t i = 0; i < ids.size(1); ++i) {
      std::printf("%s%lld:%.5f", i == 0 ? "" : " ", static_cast<long long>(id[q][i]),
                  log_prob[q][i]);
    }
    std::printf("\n");
  }
  std::fflush(stdout); // the client waits for the answer
}

void print_latencies(std::vector<double>& microseconds, int64_t batch, int threads) {
  std::sort(microseconds.begin(), microseconds.end());
  const auto percentile = [&](double share) {
    return microseconds[std::min(size_t(share * double(microseconds.size())),
                                 microseconds.size() - 1)];
  };
  std::fprintf(stderr,
               "%zu calls of up to %lld queries, %d threads: median %.1f us, 99 %% %.1f us\n",
               microseconds.size(), static_cast<long long>(batch), threads, percentile(0.5),
               percentile(0.99));
}

void run(const Options& options) {
  torch::InferenceMode inference;
  at::set_num_threads(options.threads);
  torch::inductor::AOTIModelPackageLoader model(options.model);
  std::ifstream file(options.queries);
  std::istream& in = options.queries.empty() ? std::cin : file;
  std::vector<double> microseconds;
  const int64_t width = width_of(model, options.model);
  for (int64_t line = 0;;) {
    const torch::Tensor queries = read_queries(in, options.batch, width, line);
    if (queries.size(0) == 0) {
      break;
    }
    const auto start = std::chrono::steady_clock::now();
    const std::vector<torch::Tensor> answers = model.run({queries});
    microseconds.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
    check_answers(answers, options.model);
    print_answers(answers[0], answers[1]);
  }
  if (!microseconds.empty()) {
    print_latencies(microseconds, options.batch, options.threads);
  }
}

} // namespace

int main(int argc, char** argv) {
  // Links the registration of the library's operators, which the package calls.
  xsoftmax::init();
  return run_program("serve", kUsage, argc, argv,
                     [](Arguments& arguments) { run(parse(arguments)); });
}
