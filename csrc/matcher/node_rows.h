#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

// node_rows(offsets, columns, nodes, num_nodes, costs=None) -> (offsets, rows, costs)
//
// Returns, for each node of a tree's layer, the increasing rows that a matrix pairs with the node,
// each once. A row is paired with nodes[column] for each of its columns, for instance with the
// ancestors of its labels. Of several matrices, each a part of the lists, it returns the union.
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

} // namespace xsoftmax
