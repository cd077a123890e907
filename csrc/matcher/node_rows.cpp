#include "matcher/node_rows.h"

#include "op/checks.h"
#include "op/operators.h"
#include "table/sparse_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kNodeRows = "node_rows";
// Smaller blocks, or blocks with fewer pairs than nodes, are slower.
constexpr int64_t kPairsPerBlock = 1 << 16;

struct Pairs {
  const int64_t* offset;
  const int32_t *column, *node;
};

/// Calls found(node, entry of the matrix, whether the row has not been paired with the node before)
/// for the pairs of a row. last_row: scratch [nodes], the last row that was paired with each node.
template <typename Found>
void for_nodes(const std::vector<Pairs>& matrices, int64_t row, std::vector<int32_t>& last_row,
               const Found& found) {
  for (const Pairs& pairs : matrices) {
    for (int64_t t = pairs.offset[row]; t < pairs.offset[row + 1]; ++t) {
      const int32_t node = pairs.node[pairs.column[t]];
      found(node, t, last_row[node] != row);
      last_row[node] = int32_t(row);
    }
  }
}

void check_nodes(const Tensor& nodes, int64_t num_nodes) {
  check::numbers(kNodeRows, "nodes", nodes, at::kInt);
  for (const int32_t node : span_of<int32_t>(nodes)) {
    TORCH_CHECK_INDEX(node >= 0 && node < num_nodes, kNodeRows, ": expected nodes in [0, ",
                      num_nodes, "), got ", node);
  }
}

} // namespace

void check_num_nodes(const char* op, int64_t num_nodes) {
  TORCH_CHECK_VALUE(num_nodes >= 0 && num_nodes < std::numeric_limits<int32_t>::max(), op,
                    ": expected num_nodes in [0, 2^31 - 1), got ", num_nodes);
}

NodeRows node_rows(at::TensorList offsets, at::TensorList columns, at::TensorList nodes,
                   int64_t num_nodes, const OptionalTensor& costs) {
  TORCH_CHECK_VALUE(
      !offsets.empty() && offsets.size() == columns.size() && offsets.size() == nodes.size(),
      kNodeRows, ": expected offsets, columns and nodes of at least one matrix, got ",
      offsets.size(), ", ", columns.size(), " and ", nodes.size());
  check_num_nodes(kNodeRows, num_nodes);
  check::numbers(kNodeRows, "offsets", offsets[0], at::kLong);
  const int64_t n = offsets[0].size(0) - 1;
  TORCH_CHECK_VALUE(n < std::numeric_limits<int32_t>::max(), kNodeRows,
                    ": expected fewer than 2^31 - 1 rows, got ", n);
  std::vector<Tensor> kept;
  std::vector<Pairs> matrices;
  int64_t total = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const Tensor offset = offsets[i].contiguous(), column = columns[i].contiguous(),
                 node = nodes[i].contiguous();
    check_nodes(node, num_nodes);
    check::lists(kNodeRows, "offsets", offset, "columns", column, node.size(0), /*rising=*/false);
    check::size(kNodeRows, "offsets", offset, 0, n + 1, "those of the first matrix");
    matrices.push_back({offset.const_data_ptr<int64_t>(), column.const_data_ptr<int32_t>(),
                        node.const_data_ptr<int32_t>()});
    kept.insert(kept.end(), {offset, column, node});
    total += column.size(0);
  }
  const bool has_costs = is_defined(costs);
  const Tensor cost = has_costs ? costs->contiguous() : Tensor();
  if (has_costs) {
    TORCH_CHECK_VALUE(matrices.size() == 1, kNodeRows, ": expected costs with one matrix, got ",
                      matrices.size());
    check::finite_values(kNodeRows, "costs", cost, total);
  }

  // Each block of rows counts its rows of each node, then writes them after those of earlier
  // blocks. Rows are in order for any number of blocks.
  const int64_t blocks =
      std::clamp<int64_t>(total / std::max(kPairsPerBlock, num_nodes), 1, at::get_num_threads());
  const auto for_block = [&](int64_t block, const auto& found) {
    std::vector<int32_t> last_row(num_nodes, -1);
    for (int64_t row = block * n / blocks; row < (block + 1) * n / blocks; ++row) {
      for_nodes(matrices, row, last_row,
                [&](int32_t node, int64_t t, bool is_new) { found(row, node, t, is_new); });
    }
  };
  std::vector<std::vector<int64_t>> place(blocks, std::vector<int64_t>(num_nodes, 0));
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      for_block(b, [&](int64_t, int32_t node, int64_t, bool is_new) { place[b][node] += is_new; });
    }
  });
  const Tensor ends = at::empty({num_nodes + 1}, at::kLong);
  int64_t* end = ends.mutable_data_ptr<int64_t>();
  end[0] = 0;
  for (int64_t node = 0; node < num_nodes; ++node) {
    end[node + 1] = end[node];
    for (int64_t b = 0; b < blocks; ++b) {
      end[node + 1] += std::exchange(place[b][node], end[node + 1]);
    }
  }
  const Tensor rows = at::empty({end[num_nodes]}, at::kInt),
               row_costs = at::empty({has_costs ? end[num_nodes] : 0}, at::kFloat);
  int32_t* to = rows.mutable_data_ptr<int32_t>();
  float* to_cost = row_costs.mutable_data_ptr<float>();
  const float* from_cost = has_costs ? cost.const_data_ptr<float>() : nullptr;
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      for_block(b, [&](int64_t row, int32_t node, int64_t t, bool is_new) {
        const int64_t at = is_new ? place[b][node]++ : place[b][node] - 1;
        to[at] = int32_t(row);
        if (has_costs) {
          to_cost[at] = is_new ? from_cost[t] : std::max(to_cost[at], from_cost[t]);
        }
      });
    }
  });
  return {ends, rows, row_costs};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "node_rows(Tensor[] offsets, Tensor[] columns, Tensor[] nodes, int num_nodes, "
      "Tensor? costs=None) -> (Tensor offsets, Tensor rows, Tensor costs)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("node_rows", node_rows); }

} // namespace xsoftmax
