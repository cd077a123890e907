#include "op/autocast.h"
#include "op/checks.h"
#include "op/operators.h"
#include "op/optional.h"
#include "proposal/midx/midx_index.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

// midx_codebook_loss(codewords1, codewords2, rows, bias, queries) -> scalar
//   Computes the objective of learnable codebooks (after section 6.2.3 of the MIDX paper) over a
//   sample of classes:
//
//     w1 = codewords1[nearest(rows1, codewords1)], w2 = codewords2[nearest(rows2, codewords2)]
//     product:  rows1, rows2 are the halves of rows, w = cat(w1, w2)
//     residual: rows1 = rows, rows2 = rows - w1, w = w1 + w2
//     p = softmax(queries @ rows.T + bias), q = softmax(queries @ w.T + bias)
//     loss = (rows - w).square().sum(1).mean() + mean(log sum_i p_i p_i / q_i)
//
//   The second mean is over the queries that are not all zero. Its term is the log of the
//   chi-square-like divergence that bounds the bias of the gradient (Theorem 6).
//
//   Differences from the paper: the paper encodes a row by a mean of all codewords, weighted by
//   softmax(row @ codewords.T), and sums the first term over classes. Here a row is encoded by its
//   nearest codeword, as in the index, so the objective matches the distribution of the draws.
//   Codewords learnt for the paper's means end up further from the rows than 0 is, and drive q away
//   from p. The first term is a mean, so it does not grow with the sample.
//
//   rows [S, D], bias [S] or none, queries [Q, D]: floating point, the dtype of the codewords.
//   All-zero queries are ignored. Differentiable in all arguments, but the choice of the nearest
//   codeword has no gradient.

using at::Tensor;

Tensor nearest_codewords(const Tensor& rows, const Tensor& codewords) {
  const Tensor fixed = codewords.detach();
  return codewords.index_select(
      0, (at::mm(rows.detach(), fixed.t()) - 0.5 * fixed.square().sum(1)).argmax(1));
}

Tensor midx_codebook_loss(const Tensor& codewords1, const Tensor& codewords2, const Tensor& rows,
                          const OptionalTensor& bias, const Tensor& queries) {
  constexpr const char* op = "midx_codebook_loss";
  check::dim(op, "rows", rows, 2);
  check::dim(op, "queries", queries, 2);
  check::size(op, "queries", queries, 1, rows.sym_size(1), "the columns of rows");
  check::same_dtype(op, "queries", queries, "rows", rows);
  check::same_device(op, "queries", queries, "rows", rows);
  const bool residual = check_codebooks(op, codewords1, codewords2, rows.sym_size(1));
  check::same_dtype(op, "rows", rows, "codewords1", codewords1);
  check::same_device(op, "rows", rows, "codewords1", codewords1);
  if (is_defined(bias)) {
    check::dim(op, "bias", *bias, 1);
    check::size(op, "bias", *bias, 0, rows.sym_size(0), "the rows of rows");
    check::same_dtype(op, "bias", *bias, "rows", rows);
    check::same_device(op, "bias", *bias, "rows", rows);
  }
  const int64_t width1 = codewords1.size(1), width2 = codewords2.size(1);
  const Tensor first = nearest_codewords(residual ? rows : rows.narrow(1, 0, width1), codewords1);
  const Tensor second =
      nearest_codewords(residual ? rows - first : rows.narrow(1, width1, width2), codewords2);
  const Tensor coded = residual ? first + second : at::cat({first, second}, 1);
  const Tensor log_p = at::log_softmax(at::linear(queries, rows, bias), 1),
               log_q = at::log_softmax(at::linear(queries, coded, bias), 1);
  const Tensor counts = queries.detach().ne(0).any(1).to(rows.scalar_type());
  const Tensor divergence =
      (at::logsumexp(2 * log_p - log_q, 1) * counts).sum() / counts.sum().clamp_min(1);
  return (rows - coded).square().sum() / at::Scalar(rows.sym_size(0).max(1)) + divergence;
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "midx_codebook_loss(Tensor codewords1, Tensor codewords2, Tensor rows, Tensor? bias, Tensor "
      "queries) -> Tensor",
      midx_codebook_loss);
}

XSOFTMAX_AUTOCAST(m) { disable_autocast(m, {"midx_codebook_loss"}); }

} // namespace xsoftmax
