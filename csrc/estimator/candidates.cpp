#include "estimator/candidates.h"

#include "op/checks.h"
#include "op/shape_checks.h"
#include "proposal/candidate_set.h"

#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

bool is_private(const CandidateSet& set) { return set.ids.dim() == 2; }

// Returns the position of a set in column order, 0 to 3.
int place(const CandidateSet& set) { return (is_private(set) ? 0 : 2) + (set.distinct ? 0 : 1); }

// Collects the columns of the private or of the shared sets.
struct Columns {
  std::vector<Tensor> ids, log_count;
  int64_t distinct = 0;
  bool by_query = false;

  void add(const CandidateSet& set) {
    ids.push_back(set.ids);
    log_count.push_back(set.log_count);
    by_query = by_query || set.log_count.dim() == 2;
    distinct += set.distinct ? set.ids.sym_size(-1).guard_int(__FILE__, __LINE__) : 0;
  }

  OptionalTensor all_ids(const c10::SymInt& queries) const {
    return ids.empty() ? std::nullopt : OptionalTensor(concat_columns(ids, queries));
  }
  OptionalTensor all_counts(const c10::SymInt& queries) const {
    if (ids.empty()) {
      return std::nullopt;
    }
    std::vector<Tensor> counts = log_count;
    for (Tensor& count : counts) {
      count = count.scalar_type() == counts[0].scalar_type() ? count
                                                             : count.to(counts[0].scalar_type());
    }
    return concat_columns(counts, queries, by_query);
  }
};

void add_count(Tensor& sum, const Tensor& count) {
  sum = sum.defined() ? at::logaddexp(sum, count) : count;
}

void check_set(const char* op, const CandidateSet& set) {
  check::strided(op, "ids of a set", set.ids);
  check::strided(op, "log_count of a set", set.log_count);
  TORCH_CHECK_VALUE(set.ids.dim() == 1 || set.ids.dim() == 2, op,
                    ": expected ids of a set of shape [M], or [Q, M], got ", set.ids.sym_sizes());
  check::int64(op, "ids of a set", set.ids);
  const bool per_id = set.log_count.sym_sizes() == set.ids.sym_sizes();
  const bool per_pair = !is_private(set) && set.log_count.dim() == 2 &&
      set.log_count.sym_size(1) == set.ids.sym_size(0);
  TORCH_CHECK_VALUE(per_id || per_pair, op,
                    ": expected log_count of a set of the shape of its ids, ", set.ids.sym_sizes(),
                    is_private(set) ? "" : ", or with a row for each query", ", got ",
                    set.log_count.sym_sizes());
  check::floating(op, "log_count of a set", set.log_count);
  if (set.target_log_count.defined()) {
    TORCH_CHECK_VALUE(
        set.target_log_count.dim() == 1 || set.target_log_count.dim() == 2, op,
        ": expected target_log_count of a set of shape [Q], or [Q, T] for several positives, got ",
        set.target_log_count.sym_sizes());
    check::floating(op, "target_log_count of a set", set.target_log_count);
  }
}

} // namespace

namespace {

// Checks that sets can be concatenated: tensors with one row per query have equally many rows, and
// all target_log_count have the same shape. Later checks see only the result.
void check_rows(const char* op, const Proposal& sets) {
  const Tensor *rows = nullptr, *count = nullptr;
  const CandidateSet* first_of[] = {nullptr, nullptr}; // shared, private
  for (const CandidateSet& set : sets) {
    for (const Tensor* tensor : {&set.ids, &set.log_count}) {
      if (tensor->dim() == 2) {
        rows = rows == nullptr ? tensor : rows;
        check::size(op, tensor == &set.ids ? "ids of a set" : "log_count of a set", *tensor, 0,
                    rows->sym_size(0), "the queries of the first private set");
      }
    }
    const CandidateSet*& first = first_of[is_private(set)];
    first = first == nullptr ? &set : first;
    check::same_device(op, "ids of a set", set.ids, "those of the first", first->ids);
    check::same_device(op, "log_count of a set", set.log_count, "those of the first",
                       first->log_count);
    if (set.target_log_count.defined()) {
      count = count == nullptr ? &set.target_log_count : count;
      check::same_shape(op, "target_log_count of a set", set.target_log_count, "the first of them",
                        *count);
      check::same_device(op, "target_log_count of a set", set.target_log_count, "the first of them",
                         *count);
    }
  }
}

} // namespace

Proposal make_proposal(const char* op, at::TensorList ids, at::TensorList log_count,
                       const OptionalTensors& target_log_count, const c10::List<bool>& distinct) {
  TORCH_CHECK_VALUE(
      ids.size() == log_count.size() && ids.size() == target_log_count.size() &&
          ids.size() == distinct.size(),
      op,
      ": expected ids, log_count, target_log_count and distinct with an entry for each set, got ",
      ids.size(), ", ", log_count.size(), ", ", target_log_count.size(), " and ", distinct.size());
  Proposal sets;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::optional<Tensor> target_count = target_log_count.get(i);
    sets.push_back({ids[i], log_count[i], target_count.value_or(Tensor()), distinct.get(i)});
    check_set(op, sets.back());
  }
  check_rows(op, sets);
  return sets;
}

bool in_column_order(const Proposal& sets) {
  return std::is_sorted(
      sets.begin(), sets.end(),
      [](const CandidateSet& one, const CandidateSet& other) { return place(one) < place(other); });
}

Candidates arrange_columns(const Proposal& sets, const c10::SymInt& queries,
                           const EstimatorTraits& traits) {
  Columns private_columns, shared_columns;
  Tensor count_in_all, count_in_draws;
  int64_t draws = 0; // number of sets drawn with replacement
  for (int column_group = 0; column_group < 4; ++column_group) {
    for (const CandidateSet& set : sets) {
      if (place(set) == column_group) {
        (is_private(set) ? private_columns : shared_columns).add(set);
      }
    }
  }
  for (const CandidateSet& set : sets) {
    const bool drawn = !set.distinct && set.ids.sym_size(-1) != 0;
    draws += drawn;
    if (set.target_log_count.defined()) {
      add_count(count_in_all, set.target_log_count);
      if (drawn) {
        count_in_draws = set.target_log_count;
      }
    }
  }
  Candidates candidates;
  candidates.private_ids = private_columns.all_ids(queries);
  candidates.private_log_count = private_columns.all_counts(queries);
  candidates.shared_ids = shared_columns.all_ids(queries);
  candidates.shared_log_count = shared_columns.all_counts(queries);
  candidates.distinct_private = private_columns.distinct;
  candidates.distinct_shared = shared_columns.distinct;
  if (traits.needs_target_count) {
    candidates.target_log_count = optional(count_in_all);
  } else if (traits.renormalizes && draws == 1) {
    // Samples of several distributions cannot be renormalised.
    candidates.target_log_count = optional(count_in_draws);
  }
  return candidates;
}

OptionalTensors Candidates::tensors() const {
  return OptionalTensors(
      {private_ids, shared_ids, private_log_count, shared_log_count, target_log_count});
}

Candidates::Candidates(const char* op, const OptionalTensors& tensors, at::IntArrayRef distinct) {
  TORCH_CHECK_VALUE(tensors.size() == 5, op,
                    ": expected candidates as 5 tensors, private and shared ids, their log counts, "
                    "and those of the "
                    "targets, got ",
                    tensors.size());
  TORCH_CHECK_VALUE(distinct.size() == 2, op,
                    ": expected distinct as 2 numbers of columns, private and shared ones, got ",
                    distinct.size());
  // Torch materialises zero tensors and negated views among the tensor arguments of a kernel, but
  // not those in a list of optional tensors.
  const auto in_memory = [&](size_t i) -> OptionalTensor {
    const OptionalTensor tensor = tensors.get(i);
    if (!is_defined(tensor) || !(tensor->_is_zerotensor() || tensor->is_neg())) {
      return tensor;
    }
    return tensor->_is_zerotensor() ? tensor->clone() : tensor->resolve_neg();
  };
  private_ids = in_memory(0);
  shared_ids = in_memory(1);
  private_log_count = in_memory(2);
  shared_log_count = in_memory(3);
  target_log_count = in_memory(4);
  distinct_private = distinct[0];
  distinct_shared = distinct[1];
}

void check_columns(const char* op, const char* rows_name, const Tensor& rows, const Tensor& target,
                   const Candidates& candidates) {
  const std::string rows_of = std::string("the rows of ") + rows_name;
  const auto check_per_query = [&](const char* name, const Tensor& tensor) {
    check::size(op, name, tensor, 0, rows.sym_size(0), rows_of.c_str());
    check::same_device(op, name, tensor, rows_name, rows);
  };
  check::dim(op, "target", target, 1);
  check::int64(op, "target", target);
  check_per_query("target", target);
  const auto check_kind = [&](const char* name, const OptionalTensor& ids, const char* count_name,
                              const OptionalTensor& log_count, int64_t dim, int64_t distinct,
                              const c10::SymInt& width) {
    TORCH_CHECK_VALUE(is_defined(ids) == is_defined(log_count), op, ": expected ", name, " and ",
                      count_name, ", or neither, got one");
    TORCH_CHECK_VALUE(distinct >= 0 && width >= distinct, op, ": expected distinct columns of ",
                      name, " in [0, ", width, "], got ", distinct);
    if (!is_defined(ids)) {
      return;
    }
    check::dim(op, name, *ids, dim);
    check::int64(op, name, *ids);
    check::same_device(op, name, *ids, rows_name, rows);
    check::floating(op, count_name, *log_count);
    check::same_device(op, count_name, *log_count, rows_name, rows);
    if (dim == 2) {
      check_per_query(name, *ids);
    }
    const bool per_id = log_count->sym_sizes() == ids->sym_sizes();
    const bool per_pair = dim == 1 && log_count->dim() == 2 &&
        log_count->sym_size(0) == rows.sym_size(0) && log_count->sym_size(1) == width;
    TORCH_CHECK_VALUE(per_id || per_pair, op, ": expected ", count_name, " of the shape of ", name,
                      dim == 2 ? "" : ", or with a row for each query", ", got shape ",
                      log_count->sym_sizes());
  };
  check_kind("private_ids", candidates.private_ids, "private_log_count",
             candidates.private_log_count, 2, candidates.distinct_private,
             candidates.private_width());
  check_kind("shared_ids", candidates.shared_ids, "shared_log_count", candidates.shared_log_count,
             1, candidates.distinct_shared, candidates.shared_width());
  const OptionalTensor& count = candidates.target_log_count;
  if (is_defined(count)) {
    check::dim(op, "target_log_count", *count, 1);
    check::floating(op, "target_log_count", *count);
    check_per_query("target_log_count", *count);
  }
}

void check_candidates(const char* op, const char* rows_name, const Tensor& rows,
                      const Tensor& target, const Candidates& candidates,
                      const EstimatorOptions& options) {
  check_columns(op, rows_name, rows, target, candidates);
  const Estimator& estimator = find_estimator(op, options.estimator);
  TORCH_CHECK_VALUE(!estimator.traits.needs_target_count || is_defined(candidates.target_log_count),
                    op, ": expected target_log_count of the sets that are drawn, for estimator \"",
                    estimator.name, "\", got none");
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
                    ": expected label_smoothing in [0, 1], got ", options.label_smoothing);
  TORCH_CHECK_VALUE(estimator.traits.smooths || options.label_smoothing == 0, op,
                    ": expected label_smoothing=0 for estimator \"", estimator.name, "\", got ",
                    options.label_smoothing);
}

} // namespace xsoftmax
