#include "op/checks.h"
#include "cpu/dtypes.h"
#include "table/files/mapped_file.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "loss/linear_candidate_loss.h"
#include "estimator/loss_operands.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kElementsPerTask = 16384; // elements of gathered rows and of scores

// Processes one query at a time. T: element type of the table.
template <typename T>
struct QueryPass {
  using A = opmath<T>;

  const T* input;
  const T* weight;
  const T* bias; // nullptr if absent
  int64_t features, stride;
  const int64_t* row_ids;
  int64_t queries, row_width;
  const int64_t* target;
  int64_t ignore_index;
  A* scores;
  A* grad_input;  // nullptr if not needed
  LossRows<A> rows;
  RowLoss row_loss;

  void run(int64_t first, int64_t last, A* buffer) const {
    const int64_t width = 1 + rows.candidates();
    for (int64_t q = first; q < last; ++q) {
      A* score = scores + q * rows.stride;
      A* gradient = grad_input ? grad_input + q * features : nullptr;
      if (target[q] == ignore_index) {
        rows.loss[q] = rows.ignored_loss(q);
        std::fill_n(score, width, A(0)); // `score` is also the output of the gradient
        std::fill_n(gradient, gradient ? features : 0, A(0));
        continue;
      }
      const int64_t* ids = row_ids + q * row_width;
      const auto& kernels = row_kernels().of(input);
      const auto estimate = estimator_rows().of(A{}).of(row_loss);
      kernels.dot_rows(score, input + q * features, weight, stride, ids, row_width,
                       (queries - q) * row_width, features);
      for (int64_t j = 0; bias != nullptr && j < row_width; ++j) {
        A value;
        kernels.widen_row(&value, bias + ids[j], 1);
        score[j] += value;
      }
      estimate(rows, q, q + 1, buffer);
      if (gradient) { // now, while the rows are in cache
        kernels.sum_rows(gradient, weight, stride, ids, score, row_width, features);
      }
    }
  }
};

template <typename T>
void run_queries(const QueryPass<T>& pass) {
  const int64_t elements = pass.row_width * pass.features + pass.rows.candidates();
  at::parallel_for(0, pass.queries,
                   std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements)),
                   [&](int64_t first, int64_t last) {
                     std::vector<opmath<T>> buffer(pass.rows.buffer_size(pass.row_loss));
                     pass.run(first, last, buffer.data());
                   });
}

// Returns the row ids of each query, [Q, 1 + P]: its target, or 0 if it is ignored, and its private
// candidates.
Tensor ids_of_queries(const Tensor& target, const OptionalTensor& private_ids,
                      int64_t ignore_index) {
  const Tensor targets = target.contiguous(),
               others = is_defined(private_ids) ? private_ids->contiguous() : Tensor();
  const int64_t queries = target.size(0), width = others.defined() ? others.size(1) : 0;
  const Tensor ids = at::empty({queries, 1 + width}, target.options());
  const int64_t *const target_id = targets.const_data_ptr<int64_t>(),
                       *const other = others.defined() ? others.const_data_ptr<int64_t>() : nullptr;
  int64_t* const out = ids.mutable_data_ptr<int64_t>();
  for (int64_t q = 0; q < queries; ++q) {
    out[q * (1 + width)] = target_id[q] == ignore_index ? 0 : target_id[q];
    std::copy_n(other + q * width, width, out + q * (1 + width) + 1);
  }
  return ids;
}

// Returns the target of each query, [Q], or 0 if it is ignored.
Tensor first_column(const Tensor& row_ids) {
  const int64_t queries = row_ids.size(0), width = row_ids.size(1);
  if (width == 1) {
    return strided_view(row_ids, {queries}, {1});
  }
  const Tensor first = at::empty({queries}, row_ids.options());
  const int64_t* const id = row_ids.const_data_ptr<int64_t>();
  int64_t* const out = first.mutable_data_ptr<int64_t>();
  for (int64_t q = 0; q < queries; ++q) {
    out[q] = id[q * width];
  }
  return first;
}

// The rows of the shared candidates [S, D] and a view [Q, S] of their scores; undefined if there
// are none.
struct SharedScores {
  Tensor rows, scores;

  // Writes the columns of `all` after the first `padding`.
  SharedScores(const Tensor& query, const Tensor& table, const Tensor& bias, const Tensor& ids,
               const Tensor& all, int64_t padding) {
    if (ids.size(0) == 0) {
      return;
    }
    const bool low = uses_bfloat16_operands(table);
    rows = gather_rows_cpu(table, ids, low);
    scores = strided_view(all, {query.size(0), ids.size(0)}, {all.stride(0), 1}, padding);
    if (bias.defined()) {
      scores.copy_(bias.index_select(0, ids));
    }
    const auto dtype = all.scalar_type();
    multiply(scores, low || query.scalar_type() == dtype ? query : query.to(dtype),
             transposed(rows), {.add = bias.defined(), .bfloat16 = low});
  }
};

CandidateLossState forward_cpu(const LinearLossArguments& arguments, std::array<bool, 2> wanted,
                               bool aligned) {
  constexpr const char* op = "sampled_softmax_loss"; // the operator that users call
  const Candidates& candidates = arguments.candidates;
  const Tensor &input = arguments.input, &weight = arguments.weight, &target = arguments.target;
  const int64_t ignore_index = arguments.options.ignore_index;
  const Tensor row_ids = ids_of_queries(target, candidates.private_ids, ignore_index);
  const Tensor id = first_column(row_ids);
  const Tensor shared = is_defined(candidates.shared_ids) ? candidates.shared_ids->contiguous()
                                                          : at::empty({0}, target.options());
  const int64_t queries = input.size(0), features = input.size(1), row_width = row_ids.size(1);
  const auto dtype = opmath_dtype(input.scalar_type());
  const auto floats = input.options().dtype(dtype);

  // The gradient of the scores overwrites the scores.
  const ScoreColumns layout(row_width, shared.size(0), aligned);
  const Tensor buffer = recycled_empty({queries, layout.width.expect_int()}, floats),
               loss = at::empty({queries}, floats);
  const Tensor scores =
      aligned ? buffer.narrow(1, layout.padding.expect_int(), row_width + shared.size(0)) : buffer;
  const EstimatorArguments estimation(scores, id, candidates, arguments.options,
                                      row_estimator(arguments.options));
  check::class_ids(op, "target", target, weight.size(0), ignore_index);
  if (is_defined(candidates.private_ids)) {
    check::class_ids(op, "private ids", *candidates.private_ids, weight.size(0));
  }
  check::class_ids(op, "shared ids", shared, weight.size(0));
  prefetch_rows(weight, {ids_of(row_ids), ids_of(shared)});

  const Tensor targets = target.contiguous(), query = input.contiguous(),
               table = with_unit_column_stride(weight);
  const Tensor bias = is_defined(arguments.bias) ? arguments.bias->contiguous() : Tensor();
  const Tensor grad_input = recycled_empty({wanted[0] ? queries : 0, features}, floats);
  const SharedScores of_shared(query, table, bias, shared, scores, row_width);
  const LossOperands operands(estimation, scores);
  const Tensor query_scale = LossOperands::plain(arguments.share, dtype);
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using A = opmath<T>;
    LossRows<A> rows = operands.rows<A>(estimation);
    rows.loss = data<A>(loss);
    rows.grad_scores = wanted[0] || wanted[1] ? data<A>(scores) : nullptr;
    rows.grad_loss = query_scale.defined() ? const_data<A>(query_scale) : nullptr;
    run_queries(QueryPass<T>{
        const_data<T>(query), const_data<T>(table), bias.defined() ? const_data<T>(bias) : nullptr,
        features, table.stride(0), row_ids.const_data_ptr<int64_t>(), queries, row_width,
        targets.const_data_ptr<int64_t>(), ignore_index, data<A>(scores),
        wanted[0] ? data<A>(grad_input) : nullptr, rows, *estimation.estimator.row_loss});
  });
  if (wanted[0] && of_shared.rows.defined()) {
    multiply(grad_input, of_shared.scores, of_shared.rows,
             {.add = true, .bfloat16 = uses_bfloat16_operands(weight)});
  }
  return {loss, grad_input, wanted[1] ? buffer : buffer.new_empty({0, buffer.size(1)}), row_ids};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("linear_candidate_loss_forward", linear_candidate_loss_forward<forward_cpu>);
}

} // namespace xsoftmax
