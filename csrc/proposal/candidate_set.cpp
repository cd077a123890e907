#include "proposal/candidate_set.h"

#include "cpu/impl.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/checks.h"
#include "op/find_op.h"
#include "proposal/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace xsoftmax {

using at::Tensor;

Tensor candidate_set(const Tensor& ids, int64_t num_classes) {
  static const auto op = find_op<decltype(candidate_set)>("xsoftmax::candidate_set");
  return op.call(ids, num_classes);
}

Tensor drawn_candidates(at::TensorList ids, const c10::List<bool>& distinct,
                        c10::SymInt num_queries, int64_t num_classes) {
  constexpr const char* op = "drawn_candidates";
  TORCH_CHECK_VALUE(!ids.empty() && ids.size() == distinct.size(), op,
                    ": expected ids and distinct of one set or more, got ", ids.size(), " and ",
                    distinct.size());
  check::int64(op, "ids", ids[0]);
  TORCH_CHECK_VALUE(num_queries >= 0, op, ": expected num_queries of at least 0, got ",
                    num_queries);
  if (ids.size() == 1) {
    return distinct.get(0) ? ids[0] : candidate_set(ids[0], num_classes);
  }
  std::vector<Tensor> columns;
  for (const Tensor& set_ids : ids) {
    check::int64(op, "ids", set_ids);
    check::same_device(op, "ids", set_ids, "the first of them", ids[0]);
    TORCH_CHECK_VALUE(
        set_ids.dim() == 1 || (set_ids.dim() == 2 && set_ids.sym_size(0) == num_queries), op,
        ": expected ids of shape [C] or [", num_queries, ", C], got ", set_ids.sym_sizes());
    columns.push_back(set_ids.expand_symint({num_queries, set_ids.sym_size(-1)}));
  }
  return candidate_set(at::cat(columns, 1), num_classes);
}

std::tuple<Tensor, Tensor> always_scored_set(const Tensor& ids) {
  check::int64("always_scored_set", "ids", ids);
  const Tensor log_count = at::zeros_symint(ids.sym_sizes(), ids.options().dtype(at::kFloat));
  return {ids.clamp_min(0),
          log_count.masked_fill(ids.lt(0), std::numeric_limits<double>::infinity())};
}

namespace {

void check_caller_set(const std::string& owner, const Tensor& negatives,
                      const OptionalTensor& log_count, const Tensor& input, int64_t num_classes) {
  const char* const op = owner.c_str();
  check::int64(op, "negatives", negatives);
  const c10::SymIntArrayRef queries =
      input.sym_sizes().slice(0, std::max<int64_t>(0, input.dim() - 1));
  const bool per_query =
      negatives.dim() == input.dim() && negatives.sym_sizes().slice(0, queries.size()) == queries;
  TORCH_CHECK_VALUE(
      negatives.dim() > 0 && (negatives.dim() == 1 || per_query), op,
      ": expected negatives of shape [P], or with one more dimension than the queries, ", queries,
      ", got ", negatives.sym_sizes());
  check::same_device(op, "negatives", negatives, "input", input);
  if (is_defined(log_count)) {
    check::floating(op, "negative_log_count", *log_count);
    TORCH_CHECK_VALUE(log_count->sym_sizes() == negatives.sym_sizes(), op,
                      ": expected negative_log_count of the shape of negatives, ",
                      negatives.sym_sizes(), ", got ", log_count->sym_sizes());
    check::same_device(op, "negative_log_count", *log_count, "negatives", negatives);
  }
  if (check::can_read(negatives)) {
    check::class_ids(op, "negatives", negatives, num_classes, -1);
  }
}

} // namespace

std::tuple<Tensor, Tensor> caller_set(const Tensor& negatives, const OptionalTensor& log_count,
                                      const Tensor& input, const Tensor& head, int64_t num_classes,
                                      std::string_view owner) {
  check_caller_set(std::string(owner), negatives, log_count, input, num_classes);
  const auto rows = [](const Tensor& values) {
    return values.dim() == 1 ? values : values.flatten(0, -2);
  };
  const Tensor ids = rows(negatives);
  if (is_defined(log_count)) {
    return {ids.clamp_min(0),
            rows(*log_count).masked_fill(ids.lt(0), std::numeric_limits<double>::infinity())};
  }
  return always_scored_set(candidate_set(
      head.sym_numel() == 0 ? ids : ids.masked_fill(at::isin(ids, head), -1), num_classes));
}

Tensor always_scored_log_count(const Tensor& present, const Tensor& log_count, const Tensor& ids) {
  constexpr const char* op = "always_scored_log_count";
  check::int64(op, "present", present);
  check::floating(op, "log_count", log_count);
  check::int64(op, "ids", ids);
  TORCH_CHECK_VALUE(log_count.sym_sizes() == present.sym_sizes() && present.dim() >= 1 &&
                        present.dim() <= 2 && ids.dim() >= 1 && ids.dim() <= 2,
                    op,
                    ": expected present and log_count of shape [C] or [Q, C], and ids of shape [M] "
                    "or [Q, M], got ",
                    present.sym_sizes(), ", ", log_count.sym_sizes(), " and ", ids.sym_sizes());
  TORCH_CHECK_VALUE(present.dim() == 1 || ids.dim() == 1 || ids.sym_size(0) == present.sym_size(0),
                    op, ": expected ids with ", present.sym_size(0),
                    " rows, those of present, got ", ids.sym_size(0));
  check::same_device(op, "log_count", log_count, "present", present);
  check::same_device(op, "ids", ids, "present", present);
  const Tensor ordered = std::get<0>(
      present.masked_fill(log_count.eq(std::numeric_limits<double>::infinity()), -1).sort(-1));
  const Tensor query_ids = present.dim() == 2 && ids.dim() == 1
      ? ids.expand_symint({present.sym_size(0), ids.sym_size(0)}).contiguous()
      : ids.contiguous();
  if (present.sym_size(-1) == 0) {
    return at::full_symint(query_ids.sym_sizes(), -std::numeric_limits<double>::infinity(),
                           log_count.options().dtype(at::kFloat));
  }
  const Tensor place = at::searchsorted(ordered, query_ids).clamp_max(present.sym_size(-1) - 1);
  const Tensor found = ordered.dim() == 1
      ? ordered.index_select(0, place.flatten()).view_symint(query_ids.sym_sizes())
      : ordered.gather(1, place);
  const Tensor is_present = found.eq(query_ids).logical_and(query_ids.ge(0));
  return at::zeros_symint(query_ids.sym_sizes(), log_count.options().dtype(at::kFloat))
      .masked_fill(is_present.logical_not(), -std::numeric_limits<double>::infinity());
}

Tensor distinct_ids(const Tensor& ids, int64_t num_classes, std::string_view owner,
                    std::string_view argument) {
  const bool casts =
      ids.dim() == 1 && c10::isIntegralType(ids.scalar_type(), /*includeBool=*/false);
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.dim() == 1, owner, ": expected ", argument,
                   " as a number or 1-D int64 ids, got ", check::name(ids.scalar_type()),
                   " of shape ", ids.sizes(),
                   casts ? ": use .long() of a tensor, .astype(\"int64\") of an array" : "");
  const Tensor ordered = std::get<0>(ids.sort());
  if (ids.numel() > 0) {
    const int64_t first = ordered[0].item<int64_t>(), last = ordered[-1].item<int64_t>();
    TORCH_CHECK_INDEX(first >= 0 && last < num_classes, owner, ": expected ", argument, " in [0, ",
                      num_classes, "), got ", first, " .. ", last);
    const Tensor repeats = ordered.slice(0, 1).masked_select(ordered.diff().eq(0));
    if (repeats.numel() > 0) {
      TORCH_CHECK_VALUE(false, owner, ": expected ", argument, " without repeats, got ",
                        repeats[0].item<int64_t>(), " more than once");
    }
  }
  return ordered;
}

namespace {

constexpr const char* kCandidateSet = "candidate_set";

void check_candidates(const Tensor& ids, int64_t num_classes) {
  check::int64(kCandidateSet, "candidates", ids);
  TORCH_CHECK_VALUE(ids.dim() >= 1, kCandidateSet,
                    ": expected candidates with at least 1 dimension, got none");
  TORCH_CHECK_VALUE(num_classes >= 0, kCandidateSet, ": expected num_classes of at least 0, got ",
                    num_classes);
}

Tensor candidate_set_any(const Tensor& ids, int64_t num_classes) {
  check_candidates(ids, num_classes);
  const Tensor ordered = std::get<0>(ids.sort(-1));
  const int64_t size = ids.size(-1);
  if (size == 0) {
    return ordered;
  }
  const Tensor changes = ordered.narrow(-1, 1, size - 1).ne(ordered.narrow(-1, 0, size - 1));
  return at::where(at::cat({at::ones_like(ordered.narrow(-1, 0, 1), at::kBool), changes}, -1),
                   ordered, -1);
}

Tensor candidate_set_cpu(const Tensor& ids, int64_t num_classes) {
  check_candidates(ids, num_classes);
  check::class_ids(kCandidateSet, "candidates", ids, num_classes, -1);
  if (use_reference()) {
    return candidate_set_any(ids, num_classes);
  }
  const Tensor out = ids.clone(at::MemoryFormat::Contiguous);
  const int64_t size = ids.size(-1), rows = size == 0 ? 0 : ids.numel() / size;
  int64_t* const id = out.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, query_grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t* row = id + begin * size; row != id + end * size; row += size) {
      std::sort(row, row + size);
      for (int64_t i = size - 1; i > 0; --i) {
        row[i] = row[i] == row[i - 1] ? -1 : row[i];
      }
    }
  });
  return out;
}

Tensor candidate_set_meta(const Tensor& ids, int64_t num_classes) {
  check_candidates(ids, num_classes);
  return at::empty_symint(ids.sym_sizes(), ids.options());
}

} // namespace

namespace {

constexpr int64_t kFewElements = 8192; // above this, at::cat is faster

c10::SymInt width_of(at::TensorList parts) {
  c10::SymInt width = 0;
  for (const Tensor& part : parts) {
    width += part.sym_size(-1);
  }
  return width;
}

template <typename T>
void copy_columns(const Tensor& part, const Tensor& all, int64_t first) {
  const int64_t rows = all.size(0), width = part.size(-1),
                row_step = part.dim() == 2 ? part.stride(0) : 0, step = part.stride(-1);
  const T* const from = part.const_data_ptr<T>();
  T* const to = all.mutable_data_ptr<T>() + first;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < width; ++j) {
      to[row * all.stride(0) + j] = from[row * row_step + j * step];
    }
  }
}

} // namespace

Tensor concat_columns(at::TensorList parts, const c10::SymInt& rows, bool by_rows) {
  const auto has_rows = [](const Tensor& part) { return part.dim() == 2; };
  by_rows = by_rows || std::any_of(parts.begin(), parts.end(), has_rows);
  if (parts.size() == 1 && has_rows(parts[0]) == by_rows) {
    return parts[0];
  }
  const auto dtype = parts[0].scalar_type();
  const bool copies = std::all_of(parts.begin(), parts.end(), [](const Tensor& part) {
    return check::can_read(part) && !check::has_gradient(part);
  });
  if (!copies || !by_rows || width_of(parts) * rows > kFewElements ||
      (dtype != at::kLong && dtype != at::kFloat)) {
    std::vector<Tensor> columns;
    for (const Tensor& part : parts) {
      columns.push_back(by_rows && !has_rows(part)
                            ? part.unsqueeze(0).expand_symint({rows, part.sym_size(0)})
                            : part);
    }
    return columns.size() == 1 ? columns[0] : at::cat(columns, -1);
  }
  const Tensor all =
      at::empty({rows.expect_int(), width_of(parts).expect_int()}, parts[0].options());
  int64_t first = 0;
  for (const Tensor& part : parts) {
    dtype == at::kLong ? copy_columns<int64_t>(part, all, first)
                       : copy_columns<float>(part, all, first);
    first += part.size(-1);
  }
  return all;
}

XSOFTMAX_OPERATORS(m) {
  m.def("candidate_set(Tensor ids, int num_classes) -> Tensor");
  m.def(
      "drawn_candidates(Tensor[] ids, bool[] distinct, SymInt num_queries, int num_classes) -> "
      "Tensor",
      drawn_candidates);
  m.def("always_scored_set(Tensor ids) -> (Tensor ids, Tensor log_count)", always_scored_set);
  m.def(
      "caller_set(Tensor negatives, Tensor? log_count, Tensor input, Tensor head, int num_classes, "
      "str owner) -> (Tensor ids, Tensor log_count)",
      caller_set);
  m.def("always_scored_log_count(Tensor present, Tensor log_count, Tensor ids) -> Tensor",
        always_scored_log_count);
  m.def("distinct_ids(Tensor ids, int num_classes, str owner, str argument) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("candidate_set", candidate_set_any);
  m.impl("distinct_ids", distinct_ids);
}
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("candidate_set", candidate_set_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("candidate_set", candidate_set_meta); }

} // namespace xsoftmax
