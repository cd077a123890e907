// Answers the queries of a text file one at a time with a hierarchical linear model, and prints
// precision and percentiles of the latency.

#include <xsoftmax/xsoftmax.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "arguments.h"

namespace {

constexpr const char* kUsage =
    "usage: label MODEL QUERIES.txt [--topk 5] [--beam 10] [--limit 1000] [--normalize]\n"
    "  MODEL    a folder written by `xsoftmax train` or XRLinear.save\n"
    "  QUERIES  a header \"examples features labels\", then lines of labels and feature:value "
    "pairs\n"
    "  --limit  the largest number of queries to answer\n"
    "  --normalize  scale queries to length 1; the default for a model trained by `xsoftmax train "
    "--normalize`\n";

struct Answers {
  std::vector<double> microseconds; // per query
  std::vector<double> hits; // hits[k - 1]: hits among the first k, summed over labelled queries
  int64_t labelled = 0;
};

Answers answer(const xsoftmax::XRLinear& model, const xsoftmax::Examples& queries, int64_t topk,
               int64_t beam, int64_t limit) {
  Answers answers;
  answers.hits.resize(topk, 0.0);
  const auto options = xsoftmax::XRLinearPredictOptions().topk(topk).beam(beam);
  const int64_t count = std::min(limit, queries.offsets.size(0) - 1);
  const auto ends = queries.offsets.accessor<int64_t, 1>(),
             label_ends = queries.label_offsets.accessor<int64_t, 1>();
  const int32_t* labels = queries.labels.const_data_ptr<int32_t>();
  for (int64_t q = -std::min<int64_t>(count, 20); q < count; ++q) { // negative q: warm-up
    const int64_t i = q < 0 ? q + std::min<int64_t>(count, 20) : q, size = ends[i + 1] - ends[i];
    const auto start = std::chrono::steady_clock::now();
    const auto [offsets, found, scores] =
        model.predict(torch::tensor({int64_t(0), size}), queries.features.narrow(0, ends[i], size),
                      queries.values.narrow(0, ends[i], size), options);
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - start;
    if (q < 0) {
      continue;
    }
    answers.microseconds.push_back(taken.count());
    const int32_t *begin = labels + label_ends[i], *end = labels + label_ends[i + 1];
    answers.labelled += begin < end;
    double hits = 0;
    for (int64_t k = 0; k < topk; ++k) {
      hits += k < found.size(0) && std::find(begin, end, int32_t(found[k].item<int64_t>())) != end;
      answers.hits[k] += hits;
    }
  }
  return answers;
}

void normalize(xsoftmax::Examples& queries) {
  const auto ends = queries.offsets.accessor<int64_t, 1>();
  for (int64_t q = 0; q + 1 < ends.size(0); ++q) {
    torch::Tensor row = queries.values.narrow(0, ends[q], ends[q + 1] - ends[q]);
    row.div_(row.norm().clamp_min(1e-30));
  }
}

void print(Answers& answers) {
  auto& times = answers.microseconds;
  std::sort(times.begin(), times.end());
  const auto percentile = [&](double share) {
    return times[std::min(size_t(share * double(times.size())), times.size() - 1)];
  };
  std::printf(
      "%zu queries, one at a time: median %.1f us, 90 %% %.1f us, 99 %% %.1f us, slowest %.1f us\n",
      times.size(), percentile(0.5), percentile(0.9), percentile(0.99), times.back());
  for (size_t k = 0; k < answers.hits.size() && answers.labelled > 0; ++k) {
    std::printf("precision at %zu: %.2f %%\n", k + 1,
                100 * answers.hits[k] / double(k + 1) / double(answers.labelled));
  }
}

void run(Arguments& arguments) {
  const auto topk = arguments.number<int64_t>("topk", 5, 1),
             beam = arguments.number<int64_t>("beam", 10, 1);
  const auto limit = arguments.number<int64_t>("limit", 1000, 1);
  arguments.check_all_known();
  if (arguments.positional.size() != 2) {
    throw UsageError("expected a model and a file of queries, got " +
                     std::to_string(arguments.positional.size()) + " arguments");
  }
  at::set_num_threads(1);
  const auto model = xsoftmax::XRLinear::load(arguments.positional[0]);
  xsoftmax::Examples queries = xsoftmax::read_examples(arguments.positional[1]);
  if (queries.num_features != model->features()) {
    throw UsageError("expected queries of " + std::to_string(model->features()) +
                     " features, got " + std::to_string(queries.num_features));
  }
  if (arguments.flag("normalize") ||
      model->notes().find("\"normalize\": true") !=
          std::string::npos) { // the JSON that Python writes
    normalize(queries);
  }
  std::printf("%lld labels, %lld features, %lld layers\n",
              static_cast<long long>(model->num_labels()),
              static_cast<long long>(model->features()), static_cast<long long>(model->depth()));
  Answers answers = answer(*model, queries, topk, beam, limit);
  if (answers.microseconds.empty()) {
    throw UsageError("expected a query in " + arguments.positional[1] + ", got none");
  }
  print(answers);
}

} // namespace

int main(int argc, char** argv) {
  return run_program("label", kUsage, argc, argv, run, {"normalize"});
}
