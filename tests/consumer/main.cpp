// Calls the library through its typed functions, as a linked program does.
#include "check.h"

#include <torch/torch.h>
#include <xsoftmax/ops.h>

int main() {
  xsoftmax::init();
  Checks check;
  torch::manual_seed(0);
  const at::Tensor input = at::randn({4, 8}), weight = at::randn({10, 8}),
                   shared = at::tensor({7, 0, 7}, at::kLong);

  check("candidate_scores gives the dot products", [&] {
    const at::Tensor scores =
        xsoftmax::candidate_scores(input, weight, std::nullopt, std::nullopt, shared);
    return at::allclose(scores, input.mm(weight.index_select(0, shared).t()), 1e-5, 1e-6);
  });
  check("a class table learns with a row-sparse gradient", [&] {
    at::Tensor table = weight.clone().requires_grad_();
    xsoftmax::candidate_scores(input, table, std::nullopt, std::nullopt, shared).sum().backward();
    return table.grad().is_sparse() &&
        at::allclose(table.grad().to_dense()[7], 2 * input.sum(0), 1e-5, 1e-5);
  });
  check("an id out of range throws c10::Error", [&] {
    try {
      xsoftmax::candidate_scores(input, weight, std::nullopt, std::nullopt, shared + 3);
    } catch (const c10::Error&) {
      return true;
    }
    return false;
  });
  return check.report();
}
