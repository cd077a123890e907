#include "loss/block_gradients.h"

#include "cpu/products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/sum.h>

namespace xsoftmax {

using at::Tensor;

void BlockGradients::take(BlockScratch& scratch, const ClassBlock& block, const Tensor& rows,
                          const Tensor& slope, const Tensor& input, bool first) const {
  if (input.defined()) {
    // MKL splits long sums by the number of threads, and the sums of a group must not depend on it.
    const auto product = plan.groups > 1 ? multiply_in_parts : multiply;
    product(input, slope, rows, {.add = !first, .bfloat16 = operands.rounds});
  }
  if (weight.defined()) {
    Tensor out = weight.narrow(0, block.begin, block.size);
    const bool same = out.scalar_type() == slope.scalar_type();
    const Tensor wide = same ? out : scratch.rows_buffer(block);
    multiply(wide, slope.t(), operands.input, {.add = add, .bfloat16 = operands.rounds});
    if (!same) { // 16-bit table; `add` is then false
      out.copy_(wide);
    }
  }
  if (bias.defined()) {
    Tensor out = bias.narrow(0, block.begin, block.size);
    add ? out.add_(slope.sum(0))
        : at::sum_out(out, slope, {0}, /*keepdim=*/false, out.scalar_type());
  }
}

void join_parts(const Tensor& parts, const Tensor& out) {
  at::parallel_for(0, out.size(0), kQueriesPerTask, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor mine = parts.narrow(1, first, last - first);
    Tensor sum = mine.select(0, 0);
    for (int64_t g = 1; g < parts.size(0); ++g) {
      sum.add_(mine.select(0, g));
    }
    out.narrow(0, first, last - first).copy_(sum);
  });
}

} // namespace xsoftmax
