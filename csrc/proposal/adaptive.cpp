#include "proposal/adaptive.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/state_lock.h"
#include "proposal/adaptive_checks.h"
#include "proposal/adaptive_tensors.h"
#include "op/find_op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

// The operators that find a family by its name, and what they share: growth in place and the
// schedule of refreshes.

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

// Signatures that two operators of a family have.
using Resize = std::vector<Tensor>(std::string_view, int64_t, const OptionalTensor&,
                                   const OptionalTensor&, at::TensorList, std::string_view);
template <typename Result>
using Update = Result(const Tensor&, const OptionalTensor&, const Tensor&, at::TensorList,
                      std::string_view, std::optional<at::Generator>);

// Draws and refreshes by different threads exclude each other, because counts are exact only for a
// consistent index.
std::shared_mutex& lock_of(const char* op, at::TensorList index) {
  TORCH_CHECK_VALUE(!index.empty(), op, ": expected an index of tables, got none");
  return state_lock(index.back());
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
  return operator_of<Resize>(family, "_resize")
      .call(owner, num_classes, detached(rows), detached(bias), detached(index), options);
}

std::vector<Tensor> adaptive_grow(std::string_view family, std::string_view owner,
                                  int64_t num_classes, const OptionalTensor& rows,
                                  const OptionalTensor& bias, at::TensorList index,
                                  std::string_view options) {
  return operator_of<Resize>(family, "_grow")
      .call(owner, num_classes, detached(rows), detached(bias), detached(index), options);
}

void adaptive_grow_(const Tensor& recent, at::TensorList index, at::TensorList gained,
                    int64_t before, int64_t num_classes) {
  constexpr const char* op = "adaptive_grow_";
  check_recent(op, recent);
  check_at_least(op, "before", before, 1);
  check_at_least(op, "num_classes", num_classes, 1);
  TORCH_CHECK_VALUE(index.size() == gained.size(), op, ": expected gained of ", index.size(),
                    " tables, got ", gained.size());
  const int64_t added = num_classes - before;
  TORCH_CHECK_VALUE(recent.is_meta() || recent.item<int64_t>() + added >= 0, op,
                    ": expected to remove at most the recent classes, got ", -added);
  for (size_t i = 0; i < index.size(); ++i) {
    if (gained[i].dim() > 0) {
      check::dim(op, "gained", gained[i], index[i].dim());
      check::same_dtype(op, "gained", gained[i], "the table", index[i]);
      check::same_device(op, "gained", gained[i], "the table", index[i]);
      check::size(op, "gained", gained[i], 0, std::max<int64_t>(0, added), "the added classes");
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

PrivateDraws adaptive_sample(std::string_view family, const Tensor& seed, const Tensor& queries,
                             const OptionalTensor& target, at::TensorList index,
                             std::string_view options) {
  check::strided_tensors("adaptive_sample", {{"seed", &seed}, {"queries", &queries}});
  const std::shared_lock guard(lock_of("adaptive_sample", index));
  return operator_of<PrivateDraws(const Tensor&, const Tensor&, const OptionalTensor&,
                                  at::TensorList, std::string_view)>(family, "_sample")
      .call(seed, detached(queries), target, detached(index), options);
}

Tensor adaptive_log_count(std::string_view family, const Tensor& queries, const Tensor& ids,
                          at::TensorList index, std::string_view options) {
  check::strided_tensors("adaptive_log_count", {{"queries", &queries}, {"ids", &ids}});
  const std::shared_lock guard(lock_of("adaptive_log_count", index));
  return operator_of<Tensor(const Tensor&, const Tensor&, at::TensorList, std::string_view)>(
             family, "_log_count")
      .call(detached(queries), ids, detached(index), options);
}

Tensor adaptive_refresh_(std::string_view family, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& step, at::TensorList index, std::string_view options,
                         std::optional<at::Generator> generator) {
  check::strided_tensors("adaptive_refresh_", {{"weight", &weight}, {"step", &step}});
  const std::lock_guard guard(state_lock(step));
  return operator_of<Update<Tensor>>(family, "_refresh_")
      .call(detached(weight), detached(bias), step, detached(index), options, std::move(generator));
}

void adaptive_step_(std::string_view family, const Tensor& weight, const OptionalTensor& bias,
                    const Tensor& step, at::TensorList index, std::string_view options,
                    std::optional<at::Generator> generator) {
  check::strided_tensors("adaptive_step_", {{"weight", &weight}, {"step", &step}});
  const std::lock_guard guard(state_lock(step));
  operator_of<Update<void>>(family, "_step_")
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
  const int64_t number = check::int64_item(step);
  check_at_least(op, "step", number, 0);
  return refresh_is_due(number, every);
}

XSOFTMAX_OPERATORS(m) {
  m.def("refresh_is_due(int step, int every) -> bool", [](int64_t step, int64_t every) {
    check_at_least("refresh_is_due", "step", step, 0);
    check_at_least("refresh_is_due", "every", every, 0);
    return refresh_is_due(step, every);
  });
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
