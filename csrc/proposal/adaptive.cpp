#include "proposal/adaptive.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/state_lock.h"
#include "table/updates/pending_updates.h"
#include "proposal/sampling.h"
#include "op/find_op.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>

namespace xsoftmax {

using at::Tensor;

namespace {

template <typename Signature>
auto operator_of(std::string_view family, const char* operation) {
  const std::string name = "xsoftmax::" + std::string(family) + operation;
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK_VALUE(found.has_value(), "adaptive", operation,
                    ": expected the name of a family of samplers, got '", family, "'");
  return found->typed<Signature>();
}

} // namespace

std::vector<Tensor> adaptive_index(std::string_view family, std::string_view owner,
                                   int64_t num_classes, int64_t dim, const Tensor& exclude,
                                   std::string_view options) {
  return operator_of<std::vector<Tensor>(std::string_view, int64_t, int64_t, const Tensor&,
                                         std::string_view)>(family, "_index")
      .call(owner, num_classes, dim, exclude, options);
}

std::vector<Tensor> adaptive_resize(std::string_view family, std::string_view owner,
                                    int64_t num_classes, const OptionalTensor& rows,
                                    const OptionalTensor& bias, at::TensorList index,
                                    std::string_view options) {
  return operator_of<std::vector<Tensor>(std::string_view, int64_t, const OptionalTensor&,
                                         const OptionalTensor&, at::TensorList, std::string_view)>(
             family, "_resize")
      .call(owner, num_classes, detached(rows), detached(bias), detached(index), options);
}

std::vector<Tensor> adaptive_grow(std::string_view family, std::string_view owner,
                                  int64_t num_classes, const OptionalTensor& rows,
                                  const OptionalTensor& bias, at::TensorList index,
                                  std::string_view options) {
  return operator_of<std::vector<Tensor>(std::string_view, int64_t, const OptionalTensor&,
                                         const OptionalTensor&, at::TensorList, std::string_view)>(
             family, "_grow")
      .call(owner, num_classes, detached(rows), detached(bias), detached(index), options);
}

void adaptive_grow_(const Tensor& recent, at::TensorList index, at::TensorList gained,
                    int64_t before, int64_t num_classes) {
  constexpr const char* op = "adaptive_grow_";
  check_recent(op, recent);
  check_at_least(op, "before", before, 1);
  check_at_least(op, "num_classes", num_classes, 1);
  TORCH_CHECK_VALUE(index.size() == gained.size(), op, ": expected what each of ", index.size(),
                    " tables gains, got ", gained.size());
  const int64_t added = num_classes - before;
  TORCH_CHECK_VALUE(recent.is_meta() || recent.item<int64_t>() + added >= 0, op,
                    ": expected no more classes to go than are recent, got ", -added);
  for (size_t i = 0; i < index.size(); ++i) {
    if (gained[i].dim() > 0) {
      check::dim(op, "gained", gained[i], index[i].dim());
      check::same_dtype(op, "gained", gained[i], "the table", index[i]);
      check::same_device(op, "gained", gained[i], "the table", index[i]);
      check::size(op, "gained", gained[i], 0, std::max<int64_t>(0, added), "the classes that come");
      for (int64_t axis = 1; axis < index[i].dim(); ++axis) {
        check::size(op, "gained", gained[i], axis, index[i].size(axis), "the table");
      }
      TORCH_CHECK_VALUE(index[i].size(0) + added >= 1, op,
                        ": expected tables that keep a row, got one of shape ", index[i].sizes());
    }
  }
  std::vector<Tensor> grown, rows;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < index.size(); ++i) {
    if (gained[i].dim() > 0) {
      grown.push_back(index[i]);
      rows.push_back(gained[i]);
      sizes.push_back(index[i].size(0) + added);
    }
  }
  static const auto resize =
      find_op<void(at::TensorList, at::TensorList, at::IntArrayRef)>("xsoftmax::resize_tables_");
  resize.call(grown, rows, sizes);
  recent.add_(added);
}

namespace {

// Draws and refreshes by different threads exclude each other, because counts are exact only for a
// consistent index.
std::shared_mutex& lock_of(const char* op, at::TensorList index) {
  TORCH_CHECK_VALUE(!index.empty(), op, ": expected an index of tables, got none");
  return state_lock(index.back());
}

} // namespace

PrivateDraws adaptive_sample(std::string_view family, const Tensor& seed, const Tensor& queries,
                             const OptionalTensor& target, at::TensorList index,
                             std::string_view options) {
  check::given_tensors("adaptive_sample", {{"seed", &seed}, {"queries", &queries}});
  const std::shared_lock guard(lock_of("adaptive_sample", index));
  return operator_of<PrivateDraws(const Tensor&, const Tensor&, const OptionalTensor&,
                                  at::TensorList, std::string_view)>(family, "_sample")
      .call(seed, detached(queries), target, detached(index), options);
}

Tensor adaptive_log_count(std::string_view family, const Tensor& queries, const Tensor& ids,
                          at::TensorList index, std::string_view options) {
  check::given_tensors("adaptive_log_count", {{"queries", &queries}, {"ids", &ids}});
  const std::shared_lock guard(lock_of("adaptive_log_count", index));
  return operator_of<Tensor(const Tensor&, const Tensor&, at::TensorList, std::string_view)>(
             family, "_log_count")
      .call(detached(queries), ids, detached(index), options);
}

Tensor adaptive_refresh_(std::string_view family, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& step, at::TensorList index, std::string_view options,
                         std::optional<at::Generator> generator) {
  check::given_tensors("adaptive_refresh_", {{"weight", &weight}, {"step", &step}});
  const std::lock_guard guard(state_lock(step));
  return operator_of<Tensor(const Tensor&, const OptionalTensor&, const Tensor&, at::TensorList,
                            std::string_view, std::optional<at::Generator>)>(family, "_refresh_")
      .call(detached(weight), detached(bias), step, detached(index), options, std::move(generator));
}

void adaptive_step_(std::string_view family, const Tensor& weight, const OptionalTensor& bias,
                    const Tensor& step, at::TensorList index, std::string_view options,
                    std::optional<at::Generator> generator) {
  check::given_tensors("adaptive_step_", {{"weight", &weight}, {"step", &step}});
  const std::lock_guard guard(state_lock(step));
  operator_of<void(const Tensor&, const OptionalTensor&, const Tensor&, at::TensorList,
                   std::string_view, std::optional<at::Generator>)>(family, "_step_")
      .call(detached(weight), detached(bias), step, detached(index), options, std::move(generator));
}

bool refresh_is_due(int64_t step, int64_t every) {
  if (every == 0 || step % every == 0) {
    return step == 0 || every > 0;
  }
  for (int64_t early = every / 2; early >= 1 && early >= every / 32; early /= 2) {
    if (step == early) {
      return true;
    }
  }
  return false;
}

bool next_refresh_is_due(const Tensor& step, int64_t every) {
  constexpr const char* op = "next_refresh_is_due";
  check_step(op, step);
  check_at_least(op, "every", every, 0);
  const int64_t number = check::number_of(step);
  check_at_least(op, "step", number, 0);
  return refresh_is_due(number, every);
}

ClassTable::ClassTable(const Tensor& weight, const OptionalTensor& bias, bool whole)
    : weight(detached(weight)), bias(given(bias) ? OptionalTensor(bias->detach()) : std::nullopt) {
  const at::NoGradGuard guard;
  if (whole) {
    catch_up(weight);
  }
  if (given(bias)) {
    catch_up(*bias);
  }
}

Tensor with_seed(const at::Device& device, const std::optional<at::Generator>& generator,
                 const std::function<Tensor(const Tensor&)>& refresh) {
  at::Generator source = generator.has_value() && generator->defined()
      ? *generator
      : at::globalContext().defaultGenerator(device);
  TORCH_CHECK_VALUE(source.device().type() == device.type(),
                    "prepare: expected a generator on the table's device ", device, ", got one on ",
                    source.device());
  const auto locked = [&](const auto& task) {
    const std::lock_guard<std::mutex> lock(source.mutex());
    return task();
  };
  const Tensor state = locked([&] { return source.get_state(); });
  try {
    return refresh(at::randint(std::numeric_limits<int64_t>::max(), {}, source,
                               at::TensorOptions(device).dtype(at::kLong)));
  } catch (...) {
    locked([&] { source.set_state(state); });
    throw;
  }
}

void check_at_least(std::string_view owner, const char* argument, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, owner, ": expected ", argument, " of at least ", least,
                    ", got ", value);
}

void check_distinct(std::string_view owner, int64_t num_samples, int64_t drawable) {
  TORCH_CHECK_VALUE(
      num_samples <= drawable, owner, ": expected num_samples of at most ", drawable,
      ", the number of classes that can be drawn, since a class is drawn at most once, got ",
      num_samples, ": draw fewer, or with replacement (distinct=False)");
}

Tensor check_constructor(std::string_view owner, int64_t num_classes, int64_t dim,
                         int64_t least_dim, const Tensor& exclude, int64_t drawn) {
  check_at_least(owner, "num_classes", num_classes, 1);
  check_at_least(owner, "dim", dim, least_dim);
  const std::string name(owner);
  check::dim(name.c_str(), "exclude", exclude, 1);
  check::int64(name.c_str(), "exclude", exclude);
  if (exclude.is_cpu()) {
    check::class_ids(name.c_str(), "exclude", exclude, num_classes);
  }
  const Tensor is_drawn =
      at::ones({num_classes}, exclude.options().dtype(at::kBool)).index_fill_(0, exclude, false);
  const int64_t left = is_drawn.sum().item<int64_t>();
  TORCH_CHECK_VALUE(left >= 1, owner, ": expected exclude to leave at least one of ", num_classes,
                    " classes, got all of them");
  check_distinct(owner, drawn, left);
  return is_drawn;
}

void check_private(std::string_view owner, bool shared) {
  TORCH_CHECK_VALUE(!shared, owner, ": expected shared=False, got True: it draws for each query");
}

std::vector<Tensor> with_step(at::TensorList tables, const Tensor& step) {
  std::vector<Tensor> index = tables.vec();
  index.push_back(step);
  return index;
}

std::vector<Tensor> laid_out(at::TensorList tables, const Tensor& step) {
  return with_step(with_step(tables, at::zeros_like(step)), step);
}

void check_index_size(const char* op, at::TensorList index, size_t count) {
  TORCH_CHECK_VALUE(index.size() == count, op, ": expected an index of ", count, " tables, got ",
                    index.size());
}

void check_step(const char* op, const Tensor& step) {
  check::dim(op, "step", step, 0);
  check::int64(op, "step", step);
}

void check_recent(const char* op, const Tensor& recent) {
  check::dim(op, "recent", recent, 0);
  check::int64(op, "recent", recent);
}

void check_queries(const char* op, const Tensor& queries, const c10::SymInt& dim) {
  check::floating(op, "queries", queries);
  TORCH_CHECK_VALUE(queries.dim() == 2 && queries.sym_size(1) == dim, op,
                    ": expected queries of shape [Q, ", dim, "], got ", queries.sym_sizes());
}

void check_class_table(const char* op, const Tensor& weight, const OptionalTensor& bias,
                       const c10::SymInt& num_classes, const c10::SymInt& dim, bool has_bias) {
  check::floating(op, "weight", weight);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(0) == num_classes && weight.sym_size(1) == dim, op,
      ": expected weight of shape [", num_classes, ", ", dim, "], got ", weight.sym_sizes());
  TORCH_CHECK_VALUE(given(bias) == has_bias, op, ": expected ", has_bias ? "a bias" : "no bias",
                    " for a sampler built with bias=", has_bias ? "True" : "False", ", got ",
                    given(bias) ? "one" : "none");
  if (given(bias)) {
    check::dim(op, "bias", *bias, 1);
    check::floating(op, "bias", *bias);
    check::size(op, "bias", *bias, 0, weight.sym_size(0), "the rows of weight");
    check::same_device(op, "bias", *bias, "weight", weight);
  }
}

void check_finite_rows(const char* op, const Tensor& weight) {
  constexpr int64_t kRows = 1 << 16; // bounds the memory of the squares
  const auto is_finite = [&](int64_t begin) {
    return weight.narrow(0, begin, std::min(kRows, weight.size(0) - begin))
        .to(at::kFloat)
        .square()
        .sum(1)
        .isfinite();
  };
  std::vector<Tensor> all{at::ones({}, weight.options().dtype(at::kBool))};
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    all.push_back(is_finite(begin).all());
  }
  if (at::stack(all).all().item<bool>()) { // the only value read from the device
    return;
  }
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const Tensor bad = is_finite(begin).logical_not().nonzero();
    if (bad.size(0) > 0) {
      const int64_t row = begin + bad[0].item<int64_t>();
      TORCH_CHECK_VALUE(false, op, ": expected weight with rows of finite norms, got ",
                        weight[row].norm().item<double>(), " for row ", row);
    }
  }
}

void check_finite_bias(const char* op, const OptionalTensor& bias) {
  if (given(bias)) {
    const Tensor bad = bias->isfinite().logical_not().nonzero();
    TORCH_CHECK_VALUE(bad.size(0) == 0, op, ": expected bias with finite values, got ",
                      (*bias)[bad[0].item<int64_t>()].item<double>(), " at [",
                      bad[0].item<int64_t>(), "]");
  }
}

void check_query_ids(const char* op, const Tensor& queries, const Tensor& ids) {
  check::int64(op, "ids", ids);
  check::same_device(op, "ids", ids, "queries", queries);
  TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(0) == queries.sym_size(0)),
                    op, ": expected ids of shape [S] or with a row for each query, got shape ",
                    ids.sym_sizes());
}

Tensor ids_of_queries(const Tensor& queries, const Tensor& ids) {
  return ids.dim() == 2 ? ids : ids.unsqueeze(0).expand({queries.size(0), ids.size(0)});
}

void check_draws(const char* op, const Tensor& seed, const Tensor& queries, bool shared,
                 const OptionalTensor& target) {
  check_sampling(op, seed, shared ? std::nullopt : std::optional(queries.sym_size(0)), 0);
  check::same_device(op, "seed", seed, "queries", queries);
  check_targets(op, queries, target);
}

void check_targets(const char* op, const Tensor& queries, const OptionalTensor& target) {
  if (given(target)) {
    check::int64(op, "target", *target);
    TORCH_CHECK_VALUE(
        (target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == queries.sym_size(0),
        op, ": expected target of shape [Q] or [Q, T] with Q = ", queries.sym_size(0),
        ", got shape ", target->sym_sizes());
    check::same_device(op, "target", *target, "queries", queries);
  }
}

Targets::Targets(const char* op, const OptionalTensor& target, const Tensor& queries,
                 int64_t num_classes)
    : ids(given(target) ? target->contiguous()
                        : at::empty({0}, queries.options().dtype(at::kLong))),
      width(!given(target)           ? 0
                : target->dim() == 1 ? 1
                                     : target->size(1)) {
  check::class_ids(op, "target", ids, num_classes, -1);
}

Tensor empty_target_count(const Tensor& seed, const OptionalTensor& target) {
  const auto floats = seed.options().dtype(at::kFloat);
  return given(target) ? at::empty_symint(target->sym_sizes(), floats) : at::empty({0}, floats);
}

PrivateDraws empty_private_draws(const Tensor& seed, const Tensor& queries,
                                 const OptionalTensor& target, int64_t num_samples) {
  const c10::SymInt size[] = {queries.sym_size(0), num_samples};
  return {at::empty_symint(size, seed.options()),
          at::empty_symint(size, seed.options().dtype(at::kFloat)),
          empty_target_count(seed, target)};
}

Tensor counted_queries(const Tensor& queries, const OptionalTensor& target) {
  if (!given(target) || (target->dim() == 2 && target->size(1) == 0)) {
    return queries;
  }
  const Tensor counts = (target->dim() == 2 ? target->select(1, 0) : *target).ge(0);
  return counts.all().item<bool>() ? queries : queries.index_select(0, counts.nonzero().squeeze(1));
}

RecentClasses::RecentClasses(const char* op, const Tensor& recent, int64_t drawn,
                             int64_t num_classes)
    : count_(check::number_of(recent)), first_(num_classes - count_), drawn_(drawn) {
  TORCH_CHECK_VALUE(count_ == 0 || (count_ > 0 && count_ < drawn), op, ": expected recent in [0, ",
                    drawn, "), the classes that are drawn, got ", count_);
}

Tensor RecentClasses::others(const Tensor& ids) const { return ids.masked_fill(ids.ge(first_), 0); }

Tensor RecentClasses::log_count(const Tensor& ids, const Tensor& of_others,
                                int64_t num_samples) const {
  const Tensor scaled = of_others + std::log(double(drawn_ - count_) / double(drawn_));
  return at::where(
      ids.ge(first_),
      at::full({}, std::log(double(num_samples) / double(drawn_)), of_others.options()), scaled);
}

PrivateDraws RecentClasses::join(const Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                                 const OptionalTensor& target, const PrivateDraws& of_others,
                                 int64_t num_samples) const {
  using Size = c10::SymInt;
  static const auto uniform =
      find_op<Tensor(const Tensor&, Size, Size, std::optional<Size>, Size, bool)>(
          "xsoftmax::uniform_sample");
  // Another key, so that the choice of the part is independent of the draws in it.
  constexpr int64_t kOtherKey = 0x5bd1e9955bd1e995;
  const Tensor key = seed.dim() == 0
      ? seed.bitwise_xor(kOtherKey)
      : at::cat({seed.narrow(0, 0, 1).bitwise_xor(kOtherKey), seed.narrow(0, 1, 1)});
  // Positions among all drawable classes, recent ones first.
  const Tensor place = uniform.call(key, 0, drawn_, num_queries, num_samples, false);
  const auto& [others, other_count, of_target] = of_others;
  const Tensor ids = at::where(place.lt(count_), place + first_, others);
  return {ids, log_count(ids, other_count, num_samples),
          given(target) ? log_count(*target, of_target, num_samples) : of_target};
}

std::vector<Tensor> detached(at::TensorList tensors) {
  std::vector<Tensor> plain;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(plain),
                 [](const Tensor& tensor) { return detached(tensor); });
  return plain;
}

std::vector<Tensor> to_cpu(at::TensorList tensors) {
  std::vector<Tensor> copies;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(copies),
                 [](const Tensor& tensor) { return tensor.cpu(); });
  return copies;
}

Tensor with_bias_column(const Tensor& rows, const OptionalTensor& bias, int64_t width) {
  const Tensor plain = rows.to(at::kFloat);
  if (rows.size(1) == width) {
    return plain;
  }
  const Tensor column = given(bias) ? bias->to(at::kFloat).unsqueeze(1)
                                    : at::ones({rows.size(0), 1}, plain.options());
  return at::cat({plain, column}, 1);
}

XSOFTMAX_OPERATORS(m) {
  m.def("next_refresh_is_due(Tensor step, int every) -> bool");
  m.def(
      "adaptive_index(str family, str owner, int num_classes, int dim, Tensor exclude, str "
      "options) -> Tensor[]");
  m.def(
      "adaptive_resize(str family, str owner, int num_classes, Tensor? rows, Tensor? bias, "
      "Tensor[] index, str options) -> Tensor[]");
  m.def(
      "adaptive_grow(str family, str owner, int num_classes, Tensor? rows, Tensor? bias, Tensor[] "
      "index, str options) -> Tensor[]");
  m.def(
      "adaptive_grow_(Tensor(a!) recent, Tensor(b!)[] index, Tensor[] gained, int before, int "
      "num_classes) -> ()");
  m.def(
      "adaptive_sample(str family, Tensor seed, Tensor queries, Tensor? target, Tensor[] index, "
      "str options) -> "
      "(Tensor ids, Tensor log_count, Tensor target_log_count)",
      adaptive_sample);
  m.def(
      "adaptive_log_count(str family, Tensor queries, Tensor ids, Tensor[] index, str options) -> "
      "Tensor",
      adaptive_log_count);
  m.def(
      "adaptive_refresh_(str family, Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] "
      "index, str options, "
      "Generator? generator=None) -> Tensor",
      adaptive_refresh_);
  m.def(
      "adaptive_step_(str family, Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] "
      "index, str options, "
      "Generator? generator=None) -> ()",
      adaptive_step_);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("next_refresh_is_due", next_refresh_is_due);
  m.impl("adaptive_index", adaptive_index);
  m.impl("adaptive_resize", adaptive_resize);
  m.impl("adaptive_grow", adaptive_grow);
  m.impl("adaptive_grow_", adaptive_grow_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("next_refresh_is_due",
         [](const Tensor& step, int64_t every) { // the value is not available
           check_step("next_refresh_is_due", step);
           check_at_least("next_refresh_is_due", "every", every, 0);
           return false;
         });
}

} // namespace xsoftmax
