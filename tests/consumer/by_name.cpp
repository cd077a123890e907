// Uses no symbol of the library: calls operators by their schema, through the dispatcher and in
// TorchScript.
#include "check.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/script.h>

#include <memory>

namespace {

// The graph of `torch.ops.xsoftmax.candidate_scores(input, weight, None, None, ids)` in a saved
// TorchScript module.
constexpr const char* kGraph = R"(
graph(%input : Tensor, %weight : Tensor, %ids : Tensor):
  %none : NoneType = prim::Constant()
  %sparse : bool = prim::Constant[value=1]()
  %scores : Tensor = xsoftmax::candidate_scores(%input, %weight, %none, %none, %ids, %sparse)
  return (%scores)
)";

} // namespace

int main() {
  Checks check;
  const at::Tensor input = at::randn({4, 8}), weight = at::randn({10, 8}),
                   ids = at::tensor({7, 0, 7}, at::kLong);
  const at::Tensor expected = input.mm(weight.index_select(0, ids).t());

  check("the library is loaded and its ops are registered", [] {
    return c10::Dispatcher::singleton().findSchema({"xsoftmax::candidate_scores", ""}).has_value();
  });
  check("an op is called by its schema, boxed", [&] {
    torch::jit::Stack stack{input, weight, c10::IValue(), c10::IValue(), ids, true};
    c10::Dispatcher::singleton()
        .findSchemaOrThrow("xsoftmax::candidate_scores", "")
        .callBoxed(stack);
    return at::allclose(stack.at(0).toTensor(), expected, 1e-5, 1e-6);
  });
  check("TorchScript runs the op", [&] {
    const auto graph = std::make_shared<torch::jit::Graph>();
    torch::jit::parseIR(kGraph, graph.get());
    torch::jit::GraphFunction function("score", graph, nullptr);
    torch::jit::Stack stack{input, weight, ids};
    function.run(stack);
    return at::allclose(stack.at(0).toTensor(), expected, 1e-5, 1e-6);
  });
  return check.report();
}
