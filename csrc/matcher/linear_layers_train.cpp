#include "matcher/linear_layer.h"

#include "op/operators.h"
#include "matcher/layer_pool.h"
#include "matcher/linear_layers_input.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

/// Concatenates the chunks, and empties them. Narrow: the dtype of `child` and `more`.
template <typename Narrow>
void append_parts(TrainedLayer& layer, bool half, std::vector<Tensor>& parts) {
  std::vector<LayerChunk>& chunks = layer.chunks;
  const int64_t parents = int64_t(chunks.size());
  const auto longs = at::TensorOptions(at::kLong), ints = at::TensorOptions(at::kInt);
  const Tensor chunk = at::empty({parents + 1}, longs);
  std::vector<int64_t> first_entry(parents + 1, 0);
  int64_t* begin = chunk.mutable_data_ptr<int64_t>();
  begin[0] = 0;
  for (int64_t p = 0; p < parents; ++p) {
    begin[p + 1] = begin[p] + int64_t(chunks[p].feature.size());
    first_entry[p + 1] = first_entry[p] + int64_t(chunks[p].weights());
  }
  const auto narrow = ints.dtype(c10::CppTypeToScalarType<Narrow>());
  const Tensor feature = at::empty({begin[parents]}, ints),
               more = at::empty({begin[parents]}, narrow);
  const Tensor child = at::empty({first_entry[parents]}, narrow),
               value = at::empty({first_entry[parents]}, ints.dtype(half ? at::kHalf : at::kFloat));
  at::parallel_for(0, parents, 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const LayerChunk from = std::move(chunks[p]);
      std::copy(from.feature.begin(), from.feature.end(),
                feature.mutable_data_ptr<int32_t>() + begin[p]);
      std::copy(from.more.begin(), from.more.end(), more.mutable_data_ptr<Narrow>() + begin[p]);
      std::copy(from.child.begin(), from.child.end(),
                child.mutable_data_ptr<Narrow>() + first_entry[p]);
      if (half) {
        std::copy(from.half_value.begin(), from.half_value.end(),
                  value.mutable_data_ptr<c10::Half>() + first_entry[p]);
      } else {
        std::copy(from.value.begin(), from.value.end(),
                  value.mutable_data_ptr<float>() + first_entry[p]);
      }
    }
  });
  const LayerStats& stats = layer.stats;
  parts.insert(parts.end(),
               {chunk, feature, more, child, value,
                at::tensor({double(stats.sweeps), double(stats.unconverged), double(stats.weights)},
                           at::kDouble)});
}

Tensor table_of(const std::vector<GroupTask>& tasks) {
  const Tensor table = at::empty({int64_t(tasks.size()), 4}, at::kDouble);
  double* to = table.mutable_data_ptr<double>();
  for (const GroupTask& task : tasks) {
    *to++ = double(task.layer);
    *to++ = double(task.parent);
    *to++ = double(task.first_group);
    *to++ = task.seconds;
  }
  return table;
}

} // namespace

std::vector<Tensor> linear_layers_train(at::TensorList rows, int64_t features,
                                        at::TensorList first_child, at::TensorList parents,
                                        at::TensorList labels, at::TensorList label_costs,
                                        at::TensorList initial,
                                        const std::vector<std::string>& options) {
  const LinearLayersInput input(rows, features, first_child, parents, labels, label_costs, initial,
                                options);
  LayerPool pool(kLinearLayersTrain, input.examples(), input.layers());
  std::vector<TrainedLayer> trained = pool.train();
  std::vector<Tensor> parts;
  for (size_t d = 0; d < trained.size(); ++d) {
    const LayerTask& layer = input.layers()[d];
    if (layer.max_children() > kMaxByteChildren) {
      append_parts<int32_t>(trained[d], layer.training.half, parts);
    } else {
      append_parts<uint8_t>(trained[d], layer.training.half, parts);
    }
  }
  parts.push_back(table_of(pool.tasks()));
  return parts;
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_layers_train(Tensor[] rows, int features, Tensor[] first_child, Tensor[] parents, "
      "Tensor[] labels, Tensor[] label_costs, Tensor[] initial, str[] options) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_layers_train",
         [](at::TensorList rows, int64_t features, at::TensorList first_child,
            at::TensorList parents, at::TensorList labels, at::TensorList label_costs,
            at::TensorList initial, c10::List<std::string> options) {
           return linear_layers_train(rows, features, first_child, parents, labels, label_costs,
                                      initial, options.vec());
         });
}

} // namespace xsoftmax
