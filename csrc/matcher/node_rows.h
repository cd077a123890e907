#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

// node_rows(offsets, columns, nodes, num_nodes, costs=None) -> (offsets, rows, costs)
//
// Returns, for each node of a layer, the sorted distinct rows that have the node. A row has the
// nodes nodes[column] of its columns, such as the ancestors of its labels. With several matrices,
// returns the union of their rows.
//
//   offsets, columns  int64 [n + 1], int32: the rows of each matrix (CSR)
//   nodes             int32 [columns of the matrix], below num_nodes
//   costs             float32, one per column; only with a single matrix. A row that is paired
//                     with a node more than once gets the largest; None: the result has none
//
// The result is int64 [num_nodes + 1], int32 and float32. CPU only. Raises ValueError and TypeError
// for sizes and dtypes, IndexError for columns and nodes out of range.
using NodeRows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
NodeRows node_rows(at::TensorList offsets, at::TensorList columns, at::TensorList nodes,
                   int64_t num_nodes, const OptionalTensor& costs = {});

/// Checks that the ids of nodes fit into int32.
void check_num_nodes(const char* op, int64_t num_nodes);

} // namespace xsoftmax
