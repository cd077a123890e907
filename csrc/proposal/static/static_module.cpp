#include <xsoftmax/static_samplers.h>

#include "op/checks.h"
#include "op/options.h"
#include "proposal/modules.h"
#include "proposal/static/static_follow.h"
#include "proposal/static/static_sample.h"
#include "proposal/stream/streaming_counts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

namespace xsoftmax::samplers {

using at::Tensor;

struct StaticSamplerImpl::Distribution {
  Distribution(const char* owner, const Tensor& weights, std::optional<double> power,
               const Tensor& classes, const StaticOptions& requested)
      : name(owner) {
    std::tie(tables, text) =
        static_tables(owner, optional(weights), power, optional(classes), print_options(requested));
    options = parse_options<StaticOptions>(owner, text);
  }
  const char* name;
  std::vector<Tensor> tables;
  std::string text;
  StaticOptions options;
};

namespace {

StaticOptions make_options(const char* distribution, int64_t num_classes, int64_t num_samples,
                           const DrawOptions& options) {
  const bool shared = options.shared.value_or(true);
  return {.distribution = distribution,
          .num_classes = num_classes,
          .num_samples = num_samples,
          .shared = shared,
          .distinct = options.distinct.value_or(shared)};
}

DrawOptions draw_options(const SamplerRequest& request) {
  return {.shared = request.shared, .exclude = request.exclude};
}

int64_t num_samples_of(const char* name, const SamplerRequest& request) {
  TORCH_CHECK_VALUE(request.num_samples.has_value(), "make_sampler: expected num_samples for \"",
                    name, "\", got none");
  return *request.num_samples;
}

template <typename Sampler>
void register_distribution(const char* name) {
  register_sampler(name, [name](const SamplerRequest& request) {
    return std::make_shared<Sampler>(request.num_classes, num_samples_of(name, request),
                                     draw_options(request));
  });
}

std::shared_ptr<SamplerImpl> make_unigram(const SamplerRequest& request) {
  const int64_t size = request.counts.defined() ? request.counts.numel() : 0;
  TORCH_CHECK_VALUE(size == request.num_classes, "make_sampler: expected counts of ",
                    request.num_classes, " classes for \"unigram\", got ", size);
  return std::make_shared<UnigramSamplerImpl>(request.counts, num_samples_of("unigram", request),
                                              0.75, draw_options(request));
}

[[maybe_unused]] const bool static_module_registered = [] {
  register_distribution<UniformSamplerImpl>("uniform");
  register_distribution<LogUniformSamplerImpl>("log_uniform");
  register_sampler("unigram", make_unigram);
  register_sampler("in_batch", [](const SamplerRequest& request) {
    TORCH_CHECK_VALUE(!request.num_samples.has_value(),
                      "make_sampler: expected no num_samples for \"in_batch\", whose candidates "
                      "are the targets of the batch");
    return std::make_shared<InBatchSamplerImpl>(request.num_classes);
  });
  return true;
}();

} // namespace

StaticSamplerImpl::StaticSamplerImpl(const Distribution& distribution)
    : DescribedSamplerImpl(distribution.name, distribution.options.num_classes,
                           distribution.options.num_samples, distribution.options.shared,
                           distribution.options.distinct),
      tables_(distribution.tables), options_(distribution.text) {}

StaticSamplerImpl::StaticSamplerImpl(const Tensor& weights, int64_t num_samples,
                                     const DrawOptions& options)
    : StaticSamplerImpl(Distribution("StaticSampler", weights, {}, options.exclude,
                                     make_options("table", 0, num_samples, options))) {}
UniformSamplerImpl::UniformSamplerImpl(int64_t num_classes, int64_t num_samples,
                                       const DrawOptions& options)
    : StaticSamplerImpl(Distribution("UniformSampler", {}, {}, options.exclude,
                                     make_options("uniform", num_classes, num_samples, options))) {}
LogUniformSamplerImpl::LogUniformSamplerImpl(int64_t num_classes, int64_t num_samples,
                                             const DrawOptions& options)
    : StaticSamplerImpl(
          Distribution("LogUniformSampler", {}, {}, options.exclude,
                       make_options("log_uniform", num_classes, num_samples, options))) {}
UnigramSamplerImpl::UnigramSamplerImpl(const Tensor& counts, int64_t num_samples, double power,
                                       const DrawOptions& options)
    : StaticSamplerImpl(Distribution("UnigramSampler", counts, power, options.exclude,
                                     make_options("table", 0, num_samples, options))) {}
FixedSamplerImpl::FixedSamplerImpl(int64_t num_classes, const Tensor& ids)
    : StaticSamplerImpl(
          Distribution("FixedSampler", {}, {}, ids, make_options("fixed", num_classes, 0, {}))) {}

std::string StaticSamplerImpl::describe() const { return "static:7:" + options_; }

std::shared_ptr<SamplerImpl> StaticSamplerImpl::excluding(const Tensor& ids) const {
  const std::string owner = name();
  const Tensor weights = tables_[kProbability].numel() > 0 ? tables_[kProbability] : Tensor();
  const Distribution distribution(owner.c_str(), weights, {}, ids,
                                  parse_options<StaticOptions>(owner.c_str(), options_));
  return std::shared_ptr<SamplerImpl>(new StaticSamplerImpl(distribution));
}

std::shared_ptr<SamplerImpl> FixedSamplerImpl::excluding(const Tensor& ids) const {
  const Tensor classes = tables_[kOrder];
  return std::make_shared<FixedSamplerImpl>(
      num_classes(), classes.masked_select(at::isin(classes, ids).logical_not()));
}

std::shared_ptr<SamplerImpl> LogUniformSamplerImpl::excluding(const Tensor& ids) const {
  const Tensor weights = tables_[kProbability].numel() > 0 ? tables_[kProbability] : Tensor();
  const Distribution distribution("LogUniformSampler", weights, {}, ids,
                                  parse_options<StaticOptions>("LogUniformSampler", options_));
  return std::shared_ptr<SamplerImpl>(new LogUniformSamplerImpl(distribution));
}

std::function<void()> StaticSamplerImpl::plan_resize(int64_t num_classes, const Tensor&,
                                                     const std::optional<Tensor>&) {
  auto [tables, text] = static_resize(name(), tables_, num_classes, distribution(), options_);
  return [this, num_classes, tables = std::move(tables), text = std::move(text)] {
    if (tables.size() < kStaticTables) { // only the next tail
      static const auto op = find_op<decltype(static_grow_)>("xsoftmax::static_grow_");
      op.call(tables_, tables, num_classes);
    }
    for (size_t i = 0; tables.size() == kStaticTables && i < tables.size(); ++i) {
      tables_[i].set_data(tables[i]); // set_data, because some are registered buffers
    }
    options_ = text;
    set_num_classes(num_classes);
  };
}

void StaticSamplerImpl::to(torch::Device device, bool non_blocking) {
  SamplerImpl::to(device, non_blocking);
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (i >= kLaidOut) {
      tables_[i].set_data(tables_[i].cpu()); // because every draw reads it
    } else {
      tables_[i] = tables_[i].to(device, non_blocking);
    }
  }
}

// ---- counts of a stream

StreamingCountsImpl::StreamingCountsImpl(const StreamingOptions& options)
    : TableBuffers("StreamingCounts"), num_ids_(options.num_ids), options_(print_options(options)) {
  std::tie(count, total, last, seen) = xsoftmax::streaming_counts("StreamingCounts", options_);
  count = register_buffer("count", count);
  total = register_buffer("total", total);
  if (!options.exact()) {
    last = register_buffer("last", last);
    seen = register_buffer("seen", seen);
  }
}

void StreamingCountsImpl::update(const Tensor& ids, const std::optional<Tensor>& mask) {
  static const auto op = find_op<decltype(streaming_update_)>("xsoftmax::streaming_update_");
  if (is_training()) {
    op.call(ids, mask, count, total, last, seen, options_);
  }
}

void StreamingCountsImpl::forget(const Tensor& ids) {
  static const auto op = find_op<decltype(streaming_forget_)>("xsoftmax::streaming_forget_");
  op.call(ids, count, total, last, seen, options_);
}

Tensor StreamingCountsImpl::counts(const Tensor& ids) const {
  static const auto op = find_op<decltype(streaming_count)>("xsoftmax::streaming_count");
  return op.call(ids, count, total, last, seen, options_);
}

Tensor StreamingCountsImpl::log_prob(const Tensor& ids) const {
  static const auto op = find_op<decltype(streaming_log_prob)>("xsoftmax::streaming_log_prob");
  return op.call(ids, count, total, last, seen, options_).to(at::kFloat);
}

Tensor StreamingCountsImpl::forward(const Tensor& ids) {
  update(ids);
  return log_prob(ids);
}

void StreamingCountsImpl::resize(int64_t num_ids) {
  static const auto op = find_op<decltype(streaming_resize_)>("xsoftmax::streaming_resize_");
  options_ = op.call(count, total, last, seen, num_ids, options_);
  num_ids_ = num_ids_.has_value() ? std::optional(num_ids) : std::nullopt;
}

void StreamingCountsImpl::to(torch::Device device, bool non_blocking) {
  TableBuffers::to(device, non_blocking);
  last = last.to(device, non_blocking);
  seen = seen.to(device, non_blocking);
}

namespace {

int64_t num_ids_of(const char* owner, const StreamingCounts& counts) {
  TORCH_CHECK_VALUE(!counts.is_empty() && counts->num_ids().has_value(), owner,
                    ": expected counts of dense ids, got ",
                    counts.is_empty() ? "none" : "those of open ids");
  return *counts->num_ids();
}

} // namespace

UnigramSamplerImpl::UnigramSamplerImpl(StreamingCounts counts, int64_t num_samples,
                                       const FollowOptions& follow, const DrawOptions& options)
    : StaticSamplerImpl(
          Distribution("UnigramSampler", at::ones({num_ids_of("UnigramSampler", counts)}), {},
                       options.exclude, make_options("table", 0, num_samples, options))),
      follow_(follow), draws_(options) {
  follow_.distinct = distinct();
  follow_options("UnigramSampler", print_options(follow_));
  excluded_ = tables_[kProbability].eq(0).nonzero().squeeze(1);
  streaming = register_module("streaming", counts);
  const char* names[] = {"probability", "bins",        "order",           "cumulative",
                         "laid_out",    "late_weight", "late_log_uniform"};
  for (int table = 0; table < kStaticTables; ++table) {
    if (tables_[table].numel() > 0) {
      tables_[table] = register_buffer(names[table], tables_[table]);
    }
  }
  step = register_buffer("step", at::zeros({}, at::kLong));
}

std::string UnigramSamplerImpl::describe() const {
  return streaming.is_empty()
      ? StaticSamplerImpl::describe()
      : "unigram:13:" + options_ + "|" + streaming->options() + "|" + print_options(follow_);
}

std::vector<Tensor> UnigramSamplerImpl::state_tensors() const {
  std::vector<Tensor> state = tables_;
  if (!streaming.is_empty()) {
    state.insert(
        state.end(),
        {excluded_, step, streaming->count, streaming->total, streaming->last, streaming->seen});
  }
  return state;
}

std::shared_ptr<SamplerImpl> UnigramSamplerImpl::excluding(const Tensor& ids) const {
  if (streaming.is_empty()) {
    return StaticSamplerImpl::excluding(ids);
  }
  DrawOptions draws = draws_;
  draws.exclude = at::cat({excluded_, ids.to(excluded_.device())});
  return std::make_shared<UnigramSamplerImpl>(streaming, num_samples(), follow_, draws);
}

std::function<void()> UnigramSamplerImpl::plan_resize(int64_t num_classes, const Tensor& rows,
                                                      const std::optional<Tensor>& bias) {
  return
      [this, num_classes, resize_tables = StaticSamplerImpl::plan_resize(num_classes, rows, bias)] {
        resize_tables();
        if (!streaming.is_empty()) {
          excluded_ = excluded_.masked_select(excluded_.lt(num_classes));
          streaming->resize(num_classes);
        }
      };
}

void UnigramSamplerImpl::load(torch::serialize::InputArchive& archive) {
  if (streaming.is_empty()) {
    return StaticSamplerImpl::load(archive);
  }
  bool same = true, has_distribution = false;
  std::string missing;
  for (auto& item : named_buffers(/*recurse=*/false)) {
    Tensor saved;
    if (!archive.try_read(item.key(), saved, /*is_buffer=*/true)) {
      missing += (missing.empty() ? "" : ", ") + item.key();
      continue;
    }
    has_distribution = has_distribution || item.key() == "probability";
    same = same && saved.sizes() == item.value().sizes() &&
        (item.key() != "probability" ||
         at::equal(saved.eq(0).nonzero().squeeze(1).to(excluded_.device()), excluded_));
  }
  TORCH_CHECK_VALUE(missing.empty() || !same || !has_distribution, name(),
                    ": expected a checkpoint with all tables or none of them, got one without ",
                    missing);
  same = same && missing.empty();
  if (same) {
    StaticSamplerImpl::load(archive);
    step.set_data(step.cpu());
    for (int table = kLaidOut; table < kStaticTables; ++table) {
      tables_[table].set_data(tables_[table].cpu());
    }
  } else {
    const at::NoGradGuard guard;
    step.zero_();
    torch::serialize::InputArchive counts;
    if (archive.try_read("streaming", counts)) {
      streaming->load(counts);
    }
  }
}

void UnigramSamplerImpl::to(torch::Device device, bool non_blocking) {
  StaticSamplerImpl::to(device, non_blocking);
  if (!streaming.is_empty()) {
    step.set_data(step.cpu()); // because every training step reads it
    excluded_ = excluded_.to(device, non_blocking);
  }
}

InBatchSamplerImpl::InBatchSamplerImpl(int64_t num_classes, StreamingCounts streaming_counts)
    : DescribedSamplerImpl("InBatchSampler", num_classes, kOfBatch, /*shared=*/true),
      drawn_(at::zeros({}, at::kLong)) {
  if (streaming_counts.is_empty()) {
    options_ = print_options(StreamingOptions{.num_ids = num_classes});
    std::tie(counts, total, last_, seen_) = xsoftmax::streaming_counts(name(), options_);
    counts = register_buffer("counts", counts);
    total = register_buffer("total", total);
  } else {
    TORCH_CHECK_VALUE(streaming_counts->num_ids().value_or(num_classes) == num_classes, name(),
                      ": expected counts of ", num_classes, " ids or of open ones, got ",
                      *streaming_counts->num_ids());
    streaming = register_module("streaming", streaming_counts);
    options_ = streaming->options();
  }
}

std::string InBatchSamplerImpl::describe() const { return "in_batch:5:" + options_; }

std::vector<Tensor> InBatchSamplerImpl::state_tensors() const {
  return streaming.is_empty() ? std::vector<Tensor>{counts, total, last_, seen_, drawn_}
                              : std::vector<Tensor>{streaming->count, streaming->total,
                                                    streaming->last, streaming->seen, drawn_};
}

std::function<void()> InBatchSamplerImpl::plan_resize(int64_t num_classes, const Tensor&,
                                                      const std::optional<Tensor>&) {
  TORCH_CHECK_VALUE(num_classes >= 1, name(), ": expected num_classes of at least 1, got ",
                    num_classes);
  return [this, num_classes] {
    if (streaming.is_empty()) {
      static const auto op = find_op<decltype(streaming_resize_)>("xsoftmax::streaming_resize_");
      options_ = op.call(counts, total, last_, seen_, num_classes, options_);
    } else {
      streaming->resize(num_classes);
      options_ = streaming->options();
    }
    set_num_classes(num_classes);
  };
}

void InBatchSamplerImpl::to(torch::Device device, bool non_blocking) {
  SamplerImpl::to(device, non_blocking);
  drawn_ = drawn_.to(device, non_blocking);
  if (streaming.is_empty()) {
    last_ = last_.to(device, non_blocking);
    seen_ = seen_.to(device, non_blocking);
  }
}

} // namespace xsoftmax::samplers
