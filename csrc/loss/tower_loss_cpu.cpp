#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "cpu/memory.h"
#include "cpu/products.h"
#include "op/slices.h"
#include "estimator/loss_operands.h"
#include "loss/tower_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kScoreBytes = 16 << 20; // bytes of scores

OptionalTensor rows_of(const OptionalTensor& tensor, int64_t begin, int64_t size) {
  return is_defined(tensor) ? OptionalTensor(tensor->narrow(0, begin, size)) : tensor;
}

// Returns the candidates of queries [begin, begin + size).
Candidates rows_of(const Candidates& candidates, int64_t begin, int64_t size) {
  Candidates part = candidates;
  part.private_ids = rows_of(candidates.private_ids, begin, size);
  part.private_log_count = rows_of(candidates.private_log_count, begin, size);
  part.target_log_count = rows_of(candidates.target_log_count, begin, size);
  if (is_defined(candidates.shared_log_count) && candidates.shared_log_count->dim() == 2) {
    part.shared_log_count = rows_of(candidates.shared_log_count, begin, size);
  }
  return part;
}

// All tensors are contiguous and in opmath_type. Gradients that are not needed are undefined.
struct TowerPass {
  const TowerArguments& arguments;
  Candidates candidates;
  Tensor query, target_vector, target, vectors, private_vectors, grad;
  Tensor loss, grad_query, grad_target_vector, grad_vectors, grad_private_vectors;
  bool wanted;
  bool rounds; // whether products round operands to bfloat16

  int64_t private_width() const { return private_vectors.size(1); }
  int64_t width() const { return 1 + private_width() + vectors.size(0); }

  // Computes, for queries [begin, begin + size), the loss and all gradients except those of the
  // shared vectors. The gradient of the scores overwrites the scores.
  void run_rows(Tensor scores, int64_t begin, int64_t size) {
    const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, begin, size); };
    const Tensor q = part(query), t = part(target_vector);
    Tensor shared_scores = scores.narrow(1, 1 + private_width(), vectors.size(0));
    scores.select(1, 0).copy_((q * t).sum(1));
    if (private_width() > 0) {
      scores.narrow(1, 1, private_width())
          .copy_(at::bmm(part(private_vectors), q.unsqueeze(2)).squeeze(2));
    }
    multiply_in_parts(shared_scores, q, vectors.t(), {.bfloat16 = rounds});
    scores.scalar_type() == at::kDouble ? estimate<double>(scores, begin, size)
                                        : estimate<float>(scores, begin, size);
    if (!wanted) {
      return;
    }
    const Tensor target_scores = scores.narrow(1, 0, 1),
                 private_scores = scores.narrow(1, 1, private_width());
    if (grad_query.defined()) {
      Tensor sum = part(grad_query);
      multiply_in_parts(sum, shared_scores, vectors, {.bfloat16 = rounds});
      sum.addcmul_(target_scores, t);
      if (private_width() > 0) {
        sum.add_(at::bmm(private_scores.unsqueeze(1), part(private_vectors)).squeeze(1));
      }
    }
    if (grad_target_vector.defined()) {
      Tensor product = part(grad_target_vector);
      at::mul_out(product, target_scores, q);
    }
    if (grad_private_vectors.defined()) {
      Tensor product = part(grad_private_vectors);
      at::mul_out(product, private_scores.unsqueeze(2), q.unsqueeze(1));
    }
  }

  template <typename T>
  void estimate(const Tensor& scores, int64_t begin, int64_t size) {
    const Tensor targets = target.narrow(0, begin, size);
    const EstimatorArguments estimation(scores, targets, rows_of(candidates, begin, size),
                                        arguments.options, arguments.estimator);
    const LossOperands operands(estimation);
    LossRows<T> rows = operands.rows<T>(estimation);
    rows.loss = data<T>(loss) + begin;
    rows.grad_scores = wanted ? data<T>(scores) : nullptr;
    rows.grad_loss = const_data<T>(grad) + begin;
    const RowLoss row_loss = *arguments.estimator.row_loss;
    std::vector<T> buffer(rows.buffer_size(row_loss));
    estimator_rows().of(T{}).of(row_loss)(rows, 0, size, buffer.data());
  }

  void run() {
    const int64_t queries = query.size(0), all = vectors.size(0);
    const int64_t block =
        std::max<int64_t>(kSlices, kScoreBytes / (width() * int64_t(query.element_size())));
    for (int64_t begin = 0; begin < queries; begin += block) {
      const int64_t size = std::min(block, queries - begin);
      const Tensor scores = recycled_empty({size, width()}, query.options());
      for_slices(scores, size, [&](int64_t first, int64_t count) {
        run_rows(scores.narrow(0, first, count), begin + first, count);
      });
      if (grad_vectors.defined()) {
        const Tensor shared_scores = scores.narrow(1, 1 + private_width(), all),
                     q = query.narrow(0, begin, size);
        for_slices(scores, all, [&](int64_t first, int64_t count) {
          multiply_in_parts(grad_vectors.narrow(0, first, count),
                            shared_scores.narrow(1, first, count).t(), q,
                            {.add = true, .bfloat16 = rounds});
        });
      }
    }
  }
};

TowerState tower_loss_forward_cpu(const Tensor& query, const Tensor& target_vector,
                                  const Tensor& target, const OptionalTensor& vectors,
                                  const OptionalTensor& private_vectors,
                                  const OptionalTensors& candidates, at::IntArrayRef distinct,
                                  const Tensor& grad, std::string_view options,
                                  GradientMask wanted) {
  const TowerArguments arguments(query, target_vector, target, vectors, private_vectors, candidates,
                                 distinct, options);
  if (use_reference()) {
    return tower_loss_forward_reference(arguments, grad, wanted);
  }
  check_tower_grad(grad, query);
  const auto dtype = opmath_dtype(query.scalar_type());
  const auto to_sums = [&](const Tensor& tensor) { return tensor.to(dtype).contiguous(); };
  const int64_t queries = query.size(0), features = query.size(1);
  const auto floats = query.options().dtype(dtype);
  const auto gradient = [&](const OptionalTensor& tensor, bool is_wanted, bool zero) {
    return !is_wanted || !is_defined(tensor) ? Tensor()
        : zero                               ? at::zeros(tensor->sizes(), floats)
                                             : at::empty(tensor->sizes(), floats);
  };
  TowerPass pass{arguments,
                 arguments.candidates,
                 to_sums(query),
                 to_sums(target_vector),
                 target.contiguous(),
                 is_defined(vectors) ? to_sums(*vectors) : at::empty({0, features}, floats),
                 is_defined(private_vectors) ? to_sums(*private_vectors)
                                             : at::empty({queries, 0, features}, floats),
                 to_sums(grad),
                 at::empty({queries}, floats),
                 gradient(query, wanted[0], false),
                 gradient(target_vector, wanted[1], false),
                 gradient(vectors, wanted[2], true),
                 gradient(private_vectors, wanted[3], false),
                 wanted != GradientMask{},
                 uses_bfloat16_operands(query)};
  pass.run();
  const auto result = [&](const Tensor& gradient_part, const OptionalTensor& tensor) {
    if (gradient_part.defined()) {
      return gradient_part.to(query.scalar_type());
    }
    std::vector<int64_t> shape =
        is_defined(tensor) ? tensor->sizes().vec() : std::vector<int64_t>{0, features};
    shape[0] = 0;
    return at::empty(shape, query.options());
  };
  return {pass.loss, result(pass.grad_query, query), result(pass.grad_target_vector, target_vector),
          result(pass.grad_vectors, vectors), result(pass.grad_private_vectors, private_vectors)};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("tower_loss_forward", tower_loss_forward_cpu); }

} // namespace xsoftmax
