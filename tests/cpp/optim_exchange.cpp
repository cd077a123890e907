// Continues training with a C++ optimizer from a checkpoint written by Python, and writes a
// checkpoint for Python.
//
//     optim_exchange IN OUT
//
// IN: a dict, saved by torch.save, with "optimizer" (its name), "options" (as the operators take
// them), "table", "rows" and "values" (lists, one element per step), "state" (a dict of tensors,
// empty at the start). OUT: a dict of "table" and the tensors of the state.

#include "op/options.h"

#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <fstream>
#include <iterator>

namespace {

using torch::Tensor;
namespace optim = xsoftmax::optim;

template <typename Optimizer, typename Options>
c10::Dict<std::string, Tensor> run(const c10::impl::GenericDict& in) {
  Tensor table = in.at("table").toTensor().requires_grad_();
  Optimizer optimizer(
      {table}, xsoftmax::parse_options<Options>("optim_exchange", in.at("options").toStringRef()));
  auto state = std::make_unique<optim::RowParamState>();
  for (const auto& item : in.at("state").toGenericDict()) {
    state->tensors[item.key().toStringRef()] = item.value().toTensor();
  }
  if (!state->tensors.empty()) {
    optimizer.state()[table.unsafeGetTensorImpl()] = std::move(state);
  }
  const auto rows = in.at("rows").toListRef(), values = in.at("values").toListRef();
  for (size_t i = 0; i < rows.size(); ++i) {
    table.mutable_grad() = torch::sparse_coo_tensor(rows[i].toTensor().unsqueeze(0),
                                                    values[i].toTensor(), table.sizes());
    optimizer.step();
  }
  optimizer.flush();
  c10::Dict<std::string, Tensor> out;
  out.insert("table", table.detach());
  for (const auto& [name, tensor] :
       static_cast<optim::RowParamState&>(*optimizer.state()[table.unsafeGetTensorImpl()])
           .tensors) {
    out.insert(name, tensor);
  }
  return out;
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 3, "usage: optim_exchange IN OUT");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  const auto in = torch::pickle_load(bytes).toGenericDict();
  const std::string name = in.at("optimizer").toStringRef();
  const auto out = name == "RowAdam" ? run<optim::RowAdam, optim::RowAdamOptions>(in)
      : name == "RowSGD"             ? run<optim::RowSGD, optim::RowSGDOptions>(in)
                                     : run<optim::RowAdagrad, optim::RowAdagradOptions>(in);
  const std::vector<char> saved = torch::pickle_save(out);
  std::ofstream(argv[2], std::ios::binary).write(saved.data(), std::streamsize(saved.size()));
}
