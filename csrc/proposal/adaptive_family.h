#pragma once

#include "op/autocast.h"
#include "op/checks.h"
#include "op/host_state.h"
#include "op/shape_checks.h"
#include "cpu/impl.h"
#include "op/options.h"
#include "proposal/adaptive.h"
#include "proposal/adaptive_checks.h"
#include "proposal/adaptive_index.h"
#include "proposal/adaptive_tensors.h"
#include "proposal/recent_classes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace xsoftmax {

/// Defines the operators of adaptive.h for a family, described by a struct F:
///
///     name                                   X
///     num_statistics                         number of statistics that a refresh returns
///     Options                                a struct of xsoftmax/options.h
///     Index(op, tables, options)             derives from AdaptiveIndex; checks the tables
///     check_options(op, options)             checks options that not all families have
///     min_dim(options)                     smallest width of the class table
///     make(is_drawn bool [N], dim, options)  returns the tables of X_index but `recent` and `step`
///     resized(is_drawn bool [N], rows, bias, index, options)
///         returns the same tables for another number of classes: those of `index` come first, then
///         those of `rows`; rows is none if the index does not know the table yet
///     gained(op, rows, bias, added, index, options)
///         returns the results of X_grow: one tensor per table, undefined for a table without a row
///         per class; empty if X_resize is needed. rows is none if the index does not know the
///         table, or if classes are removed
///     exclude_last(index, count)
///         cuts the last `count` classes off tables that draws read by place
///     refresh(op, table, index, options, generator)
///         updates the index and returns the statistics; must not write before everything has
///         succeeded
///     update_between_refreshes(op, weight, bias, index, options)
///     update_between_refreshes_cuda(op, weight, bias, index, options)
///         optional: run in a step that does not refresh, on the CPU or on CUDA
///     has_reference(options)                 whether log_count_reference supports these options
///     log_count_reference(queries, ids, index, options)
///         the composite in ATen calls: for any device, and the tests' oracle
///     sample_cpu(seed, queries, target, targets, index, options)
///     log_count_cpu(queries, ids, index, options)
///     sample_cuda(seed, queries, target, index, options)
///     log_count_cuda(queries, ids, index, options)
///
/// Arguments are already checked. CUDA kernels draw the same classes as the CPU; values that the
/// CPU checks are asserted there. A device without its own kernels gets the CPU's draws.
template <typename F>
class AdaptiveFamily {
 public:
  using Tensor = at::Tensor;
  using Options = typename F::Options;
  using Index = typename F::Index;

  static Options options(const char* op, std::string_view text) {
    const Options options = parse_options<Options>(op, text);
    check_at_least(op, "num_samples", options.num_samples, 0);
    check_at_least(op, "refresh_every", options.refresh_every, 0);
    F::check_options(op, options);
    return options;
  }

  static void define(torch::Library& m) {
    const auto def = [&](const char* operation, const char* signature) {
      m.def((name(operation) + signature).c_str(), kUsesHostState);
    };
    def("_index", "(str owner, int num_classes, int dim, Tensor exclude, str options) -> Tensor[]");
    def("_sample",
        "(Tensor seed, Tensor queries, Tensor? target, Tensor[] index, str options) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
    def("_log_count", "(Tensor queries, Tensor ids, Tensor[] index, str options) -> Tensor");
    for (const char* operation : {"_resize", "_grow"}) {
      def(operation,
          "(str owner, int num_classes, Tensor? rows, Tensor? bias, Tensor[] index, str options) "
          "-> Tensor[]");
    }
    def("_refresh_",
        "(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, "
        "Generator? generator=None) -> Tensor");
    def("_step_",
        "(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, "
        "Generator? generator=None) -> ()");
  }

  static void on_any_device(torch::Library& m) {
    m.impl(name("_index").c_str(), make_index);
    m.impl(name("_resize").c_str(), resize);
    m.impl(name("_grow").c_str(), grow);
    m.impl(name("_sample").c_str(), sample_elsewhere);
    m.impl(name("_log_count").c_str(), log_count_elsewhere);
    m.impl(name("_refresh_").c_str(), refresh_);
    m.impl(name("_step_").c_str(), step_</*kOnCuda=*/false>);
  }

  static void on_meta(torch::Library& m) {
    m.impl(name("_sample").c_str(), sample_meta);
    m.impl(name("_log_count").c_str(), log_count_meta);
    m.impl(name("_refresh_").c_str(), refresh_meta);
    m.impl(name("_step_").c_str(), step_meta);
  }

  static void on_cpu(torch::Library& m) {
    m.impl(name("_sample").c_str(), sample_cpu);
    m.impl(name("_log_count").c_str(), log_count_cpu);
  }

  static void on_cuda(torch::Library& m) {
    m.impl(name("_sample").c_str(), sample_cuda);
    m.impl(name("_log_count").c_str(), log_count_cuda);
    m.impl(name("_step_").c_str(), step_</*kOnCuda=*/true>);
  }

  static void under_autocast(torch::Library& m) {
    for (const char* operation : {"_sample", "_log_count", "_refresh_", "_step_"}) {
      disable_autocast(m, {name(operation).c_str()});
    }
  }

 private:
  static std::string name(const char* operation) { return std::string(F::name) + operation; }

  /// Names of the operators for errors.
  static const char* sampling() {
    static const std::string op = name("_sample");
    return op.c_str();
  }
  static const char* counting() {
    static const std::string op = name("_log_count");
    return op.c_str();
  }
  static const char* refreshing() {
    static const std::string op = name("_refresh_");
    return op.c_str();
  }
  static const char* stepping() {
    static const std::string op = name("_step_");
    return op.c_str();
  }

  /// The checked options and index of a call.
  struct Sampler {
    Sampler(const char* op, at::TensorList tables, std::string_view text)
        : options(AdaptiveFamily::options(op, text)), index(op, tables, options) {}
    Options options;
    Index index;
  };

  static Sampler checked_sample(const Tensor& seed, const Tensor& queries,
                                const OptionalTensor& target, at::TensorList tables,
                                std::string_view text) {
    Sampler sampler(sampling(), tables, text);
    check_queries(sampling(), queries, sampler.index.dim);
    check::same_device(sampling(), "index", sampler.index.places, "queries", queries);
    check_draws(sampling(), seed, queries, sampler.options.shared, target);
    return sampler;
  }

  static Sampler checked_log_count(const Tensor& queries, const Tensor& ids, at::TensorList tables,
                                   std::string_view text) {
    Sampler sampler(counting(), tables, text);
    check_queries(counting(), queries, sampler.index.dim);
    check::same_device(counting(), "index", sampler.index.places, "queries", queries);
    check_query_ids(counting(), queries, ids);
    TORCH_CHECK_VALUE(
        sampler.options.shared || !sampler.options.is_distinct(), counting(),
        ": expected independent private draws, got distinct ones, whose counts only a draw knows");
    return sampler;
  }

  static Sampler checked_refresh(const char* op, const Tensor& weight, const OptionalTensor& bias,
                                 const Tensor& step, at::TensorList others, std::string_view text) {
    Sampler sampler(op, with_step(others, step), text);
    check_class_table(op, weight, bias, sampler.index.places.sym_size(0), sampler.index.dim,
                      sampler.options.bias);
    check::same_device(op, "index", sampler.index.places, "weight", weight);
    return sampler;
  }

  static std::vector<Tensor> make_index(std::string_view owner_name, int64_t num_classes,
                                        int64_t dim, const Tensor& exclude, std::string_view text) {
    const std::string owner(owner_name);
    const Options parsed = options(owner.c_str(), text);
    const Tensor is_drawn = check_constructor(owner, num_classes, dim, F::min_dim(parsed), exclude,
                                              parsed.is_distinct() ? parsed.num_samples : 1);
    return new_index(F::make(is_drawn, dim, parsed), at::zeros({}, exclude.options()));
  }

  static std::vector<Tensor> grow(std::string_view owner_name, int64_t num_classes,
                                  const OptionalTensor& rows, const OptionalTensor& bias,
                                  at::TensorList tables, std::string_view text) {
    const std::string owner(owner_name);
    const Sampler sampler(owner.c_str(), tables, text);
    const Index& index = sampler.index;
    const ClassChange change(owner.c_str(), num_classes, rows, bias, index, sampler.options.bias);
    change.check_new_bias();
    if (index.places.is_meta() || sampler.options.is_distinct() || !change.can_grow()) {
      return {};
    }
    const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
    std::vector<Tensor> gained =
        F::gained(index.known() && change.added > 0 ? rows : std::nullopt, change.new_bias(),
                  change.added - change.removed, index, sampler.options);
    for (Tensor& rows_of_table : gained) {
      rows_of_table = !rows_of_table.defined() ? at::zeros({}, index.places.options())
          : is_defined(rows) && rows_of_table.is_alias_of(*rows) ? rows_of_table.clone()
                                                                 : rows_of_table;
    }
    return gained;
  }

  static std::vector<Tensor> resize(std::string_view owner_name, int64_t num_classes,
                                    const OptionalTensor& rows, const OptionalTensor& bias,
                                    at::TensorList tables, std::string_view text) {
    const std::string owner(owner_name);
    const Sampler sampler(owner.c_str(), tables, text);
    const Index& index = sampler.index;
    const ClassChange change(owner.c_str(), num_classes, rows, bias, index, sampler.options.bias);
    const bool known = change.check_known();
    const Tensor is_drawn =
        change.check_drawn(sampler.options.is_distinct() ? sampler.options.num_samples : 1);
    const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
    const OptionalTensor no_rows =
        at::empty({0, index.dim.expect_int()}, index.places.options().dtype(at::kFloat));
    const OptionalTensor new_rows = !known ? std::nullopt : is_defined(rows) ? rows : no_rows;
    return new_index(F::resized(is_drawn, new_rows, bias, index, sampler.options),
                     known ? index.step.clone() : at::zeros_like(index.step));
  }

  /// Draws from the indexed part by draw(target, index), and adds the recent classes.
  template <typename Draw>
  static PrivateDraws draws(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                            const Sampler& sampler, const Draw& draw) {
    const RecentClasses recent(sampling(), sampler.index.recent, drawn_in(sampler.index),
                               sampler.index.num_classes.expect_int());
    if (recent.count() == 0) {
      return draw(target, sampler.index);
    }
    check_not_distinct(sampling(), sampler.options);
    const auto num_queries =
        sampler.options.shared ? std::nullopt : std::optional(queries.sym_size(0));
    return recent.join(seed, num_queries, target,
                       draw(recent.others(target), exclude_recent(sampler.index, recent)),
                       sampler.options.num_samples);
  }

  /// Counts in the indexed part by count(ids, index), and adds the recent classes.
  template <typename Count>
  static Tensor log_counts(const Tensor& ids, const Sampler& sampler, const Count& count) {
    const RecentClasses recent(counting(), sampler.index.recent, drawn_in(sampler.index),
                               sampler.index.num_classes.expect_int());
    if (recent.count() == 0) {
      return count(ids, sampler.index);
    }
    check_not_distinct(counting(), sampler.options);
    return recent.log_count(ids, count(recent.others(ids), exclude_recent(sampler.index, recent)),
                            sampler.options.num_samples);
  }

  /// The same by a kernel, or by the composite if a family has one and it is asked for.
  template <typename Kernel>
  static Tensor log_counts_by(const Kernel& kernel, const Tensor& queries, const Tensor& ids,
                              const Sampler& sampler) {
    const bool by_reference = use_reference() && F::has_reference(sampler.options);
    return log_counts(ids, sampler, [&](const Tensor& ids, const Index& index) {
      return (by_reference ? F::log_count_reference : kernel)(queries, ids, index, sampler.options);
    });
  }

  /// Returns the number of drawable classes. (With the option `slots`, order is empty.)
  static int64_t drawn_in(const Index& index) {
    return index.order.size(0) > 0 ? index.order.size(0) : index.num_classes.expect_int();
  }

  static void check_not_distinct(const char* op, const Options& options) {
    TORCH_CHECK_VALUE(!options.is_distinct(), op,
                      ": expected an index without recent classes for distinct draws");
  }

  static Index exclude_recent(const Index& index, const RecentClasses& recent) {
    Index older_classes = index;
    F::exclude_last(older_classes, recent.count());
    return older_classes;
  }

  static PrivateDraws sample_meta(const Tensor& seed, const Tensor& queries,
                                  const OptionalTensor& target, at::TensorList tables,
                                  std::string_view text) {
    const Options options = checked_sample(seed, queries, target, tables, text).options;
    if (!options.shared) {
      return empty_private_draws(seed, queries, target, options.num_samples);
    }
    return {at::empty({options.num_samples}, seed.options()),
            at::empty({options.num_samples}, seed.options().dtype(at::kFloat)),
            empty_target_count(seed, target)};
  }

  static PrivateDraws sample_cpu(const Tensor& seed, const Tensor& queries,
                                 const OptionalTensor& target, at::TensorList tables,
                                 std::string_view text) {
    const Sampler sampler = checked_sample(seed, queries, target, tables, text);
    const Targets checked(sampling(), target, queries, sampler.index.num_classes.expect_int());
    return draws(
        seed, queries, target, sampler, [&](const OptionalTensor& target, const Index& index) {
          const Targets targets(sampling(), target, queries, index.num_classes.expect_int());
          return F::sample_cpu(seed, queries, target, targets, index, sampler.options);
        });
  }

  static PrivateDraws sample_cuda(const Tensor& seed, const Tensor& queries,
                                  const OptionalTensor& target, at::TensorList tables,
                                  std::string_view text) {
    const Sampler sampler = checked_sample(seed, queries, target, tables, text);
    return draws(seed, queries, target, sampler,
                 [&](const OptionalTensor& target, const Index& index) {
                   return F::sample_cuda(seed, queries, target, index, sampler.options);
                 });
  }

  static PrivateDraws sample_elsewhere(const Tensor& seed, const Tensor& queries,
                                       const OptionalTensor& target, at::TensorList tables,
                                       std::string_view text) {
    const auto [ids, log_count, target_log_count] =
        adaptive_sample(F::name, seed.cpu(), queries.cpu(), to_cpu(target), to_cpu(tables), text);
    return {ids.to(queries.device()), log_count.to(queries.device()),
            target_log_count.to(queries.device())};
  }

  static Tensor log_count_meta(const Tensor& queries, const Tensor& ids, at::TensorList tables,
                               std::string_view text) {
    const Options options = checked_log_count(queries, ids, tables, text).options;
    const auto floats = ids.options().dtype(at::kFloat);
    return options.shared ? at::empty_symint(ids.sym_sizes(), floats)
                          : at::empty_symint({queries.sym_size(0), ids.sym_size(-1)}, floats);
  }

  static Tensor log_count_cpu(const Tensor& queries, const Tensor& ids, at::TensorList tables,
                              std::string_view text) {
    const Sampler sampler = checked_log_count(queries, ids, tables, text);
    check::class_ids(counting(), "ids", ids, sampler.index.num_classes.expect_int());
    return log_counts_by(F::log_count_cpu, queries, ids, sampler);
  }

  static Tensor log_count_cuda(const Tensor& queries, const Tensor& ids, at::TensorList tables,
                               std::string_view text) {
    const Sampler sampler = checked_log_count(queries, ids, tables, text);
    return log_counts_by(F::log_count_cuda, queries, ids, sampler);
  }

  static Tensor log_count_elsewhere(const Tensor& queries, const Tensor& ids, at::TensorList tables,
                                    std::string_view text) {
    const Sampler sampler = checked_log_count(queries, ids, tables, text);
    return F::has_reference(sampler.options)
        ? log_counts(ids, sampler,
                     [&](const Tensor& ids, const Index& index) {
                       return F::log_count_reference(queries, ids, index, sampler.options);
                     })
        : adaptive_log_count(F::name, queries.cpu(), ids.cpu(), to_cpu(tables), text)
              .to(queries.device());
  }

  static Tensor refreshed(const char* op, const Tensor& weight, const OptionalTensor& bias,
                          const Sampler& sampler, std::optional<at::Generator> generator) {
    const ClassTable table(weight, bias);
    const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
    const Tensor statistics = F::refresh(op, table, sampler.index, sampler.options, generator);
    sampler.index.recent.zero_();
    return statistics;
  }

  static Tensor refresh_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step,
                         at::TensorList others, std::string_view text,
                         std::optional<at::Generator> generator) {
    const Sampler sampler = checked_refresh(refreshing(), weight, bias, step, others, text);
    const Tensor statistics = refreshed(refreshing(), weight, bias, sampler, std::move(generator));
    sampler.index.step.clamp_min_(1);
    return statistics;
  }

  /// Runs a step on CUDA, or on any other device.
  template <bool kOnCuda>
  static void step_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step,
                    at::TensorList others, std::string_view text,
                    std::optional<at::Generator> generator) {
    const Sampler sampler = checked_refresh(stepping(), weight, bias, step, others, text);
    const auto& [options, index] = sampler;
    if (refresh_is_due(check::int64_item(index.step), options.refresh_every)) {
      refreshed(stepping(), weight, bias, sampler, std::move(generator));
    } else if constexpr (kOnCuda && requires { F::update_between_refreshes_cuda; }) {
      F::update_between_refreshes_cuda(stepping(), weight, bias, index, options);
    } else if constexpr (!kOnCuda && requires { F::update_between_refreshes; }) {
      F::update_between_refreshes(stepping(), weight, bias, index, options);
    }
    check::add_to_item(index.step, 1);
  }

  static Tensor refresh_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step,
                             at::TensorList others, std::string_view text,
                             std::optional<at::Generator>) {
    checked_refresh(refreshing(), weight, bias, step, others, text);
    return at::empty({F::num_statistics}, weight.options().dtype(at::kDouble).requires_grad(false));
  }

  static void step_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step,
                        at::TensorList others, std::string_view text,
                        std::optional<at::Generator>) {
    checked_refresh(stepping(), weight, bias, step, others, text);
  }
};

} // namespace xsoftmax
