// Names no symbol of the library: operators by their schema, from the dispatcher and from TorchScript.
#include "check.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/script.h>

namespace {

constexpr const char* kScript = R"(
def score(input, weight, ids):
    # type: (Tensor, Tensor, Tensor) -> Tensor
    return torch.ops.xsoftmax.candidate_scores(input, weight, None, None, ids, True)
)";

} // namespace

int main() {
  Checks check;
  const at::Tensor input = at::randn({4, 8}), weight = at::randn({10, 8}), ids = at::tensor({7, 0, 7}, at::kLong);
  const at::Tensor expected = input.mm(weight.index_select(0, ids).t());

  check("the library is loaded and its ops are registered", [] {
    return c10::Dispatcher::singleton().findSchema({"xsoftmax::candidate_scores", ""}).has_value();
  });
  check("an op is called by its schema, boxed", [&] {
    torch::jit::Stack stack{input, weight, c10::IValue(), c10::IValue(), ids, true};
    c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::candidate_scores", "").callBoxed(stack);
    return at::allclose(stack.at(0).toTensor(), expected, 1e-5, 1e-6);
  });
  check("TorchScript source compiles and runs", [&] {
    const auto unit = torch::jit::compile(kScript);
    return at::allclose(unit->run_method("score", input, weight, ids).toTensor(), expected, 1e-5, 1e-6);
  });
  return check.report();
}
