#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "tree/edge_tables.h"
#include "tree/routed_draws.h"

#include <ATen/Parallel.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kElementsPerTask = 65536;

// Balances one node: subtracts the mean of its children's rows from each of them and adds it to the
// node's row. The children's rows are contiguous.
template <typename T>
void balance_node(T* node_row, T* children, int64_t count, int64_t width, std::vector<T>& mean) {
  std::copy_n(children, width, mean.begin());
  for (int64_t c = 1; c < count; ++c) {
    for (int64_t d = 0; d < width; ++d) {
      mean[d] += children[c * width + d];
    }
  }
  for (int64_t d = 0; d < width; ++d) {
    mean[d] /= T(count);
    node_row[d] += mean[d];
  }
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t d = 0; d < width; ++d) {
      children[c * width + d] -= mean[d];
    }
  }
}

template <typename T>
void balance(const Tensor& table, const int64_t* first_child, int64_t nodes,
             at::IntArrayRef layer_sizes) {
  T* rows = data<T>(table);
  const int64_t width = table.dim() == 1 ? 1 : table.size(1);
  int64_t end = nodes;
  for (int64_t layer = int64_t(layer_sizes.size()) - 1; layer > 0; --layer) {
    end -= layer_sizes[layer];
    const int64_t begin = end - layer_sizes[layer - 1]; // first node of the layer above
    const int64_t per_node =
        std::max<int64_t>(1, width * layer_sizes[layer] / layer_sizes[layer - 1]);
    at::parallel_for(begin, end, std::max<int64_t>(1, kElementsPerTask / per_node),
                     [&](int64_t first, int64_t last) {
                       std::vector<T> mean(width);
                       for (int64_t v = first; v < last; ++v) {
                         const int64_t children = first_child[v], next = first_child[v + 1];
                         if (next > children) {
                           balance_node(rows + (v - 1) * width, rows + (children - 1) * width,
                                        next - children, width, mean);
                         }
                       }
                     });
  }
}

void tree_balance_cpu(const Tensor& table, const Tensor& first_child, at::IntArrayRef layer_sizes) {
  check_tree_balance(table, first_child, layer_sizes);
  if (use_reference() || !table.is_contiguous() ||
      (table.scalar_type() != at::kFloat && table.scalar_type() != at::kDouble)) {
    tree_balance_reference(table, first_child, layer_sizes);
    return;
  }
  const Tensor offsets = first_child.contiguous();
  check_children(offsets, layer_sizes); // before anything is written
  const auto run = table.scalar_type() == at::kFloat ? balance<float> : balance<double>;
  run(table, offsets.const_data_ptr<int64_t>(), table.size(0) + 1, layer_sizes);
}

Tensor routed_candidates_cpu(const Tensor& seed_argument, const Tensor& scores,
                             const Tensor& first_child, const Tensor& node_class, int64_t count) {
  check_routed(seed_argument, scores, first_child, node_class, count);
  const Tensor best = scores.argmax(1), offsets = first_child.contiguous(),
               classes = node_class.contiguous();
  const Tensor found = at::full({scores.size(0), count}, -1, best.options());
  const int64_t *subset = best.const_data_ptr<int64_t>(),
                *first = offsets.const_data_ptr<int64_t>(),
                *known = classes.const_data_ptr<int64_t>();
  int64_t* to = found.mutable_data_ptr<int64_t>();
  const uint64_t seed = uint64_t(seed_argument.item<int64_t>());
  for (int64_t q = 0; q < scores.size(0); ++q) {
    const int64_t begin = first[subset[q] + 1], end = first[subset[q] + 2];
    TORCH_CHECK_VALUE(begin >= 0 && begin <= end && end <= classes.size(0),
                      "tree_routed_candidates: expected the children of node ", subset[q] + 1,
                      " in [0, ", classes.size(0), "), got [", begin, ", ", end, ")");
    const RoutedSample draws(seed, uint64_t(q), begin, end, count);
    for (int64_t k = 0; k < draws.size(); ++k) {
      to[q * count + k] = known[draws[k]];
    }
  }
  return found;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("tree_balance_", tree_balance_cpu);
  m.impl("tree_routed_candidates", routed_candidates_cpu);
}

} // namespace xsoftmax
