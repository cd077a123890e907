#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace xsoftmax {

/// Returns whether the table is in a file that is open for writing, so that its updates outlive the
/// process.
bool is_in_file(const at::Tensor& table);

struct MappedState {
  std::vector<at::Tensor> tensors;
  bool existed; ///< whether the files held the state of earlier steps
};

/// Opens or creates the state of a row optimizer for a table in a file. The state is one file next
/// to the table's, such as `path`.row_adagrad. It includes the step counter, so an optimizer in
/// another process can continue from it alone. New tensors have the shapes of `like`: zeros, except
/// that floating-point state with one row per table row is filled with `initial`. `rows_op` is the
/// optimizer's operator, such as "row_adagrad_rows_".
MappedState mapped_state(const at::Tensor& table, std::string rows_op,
                         const std::vector<const char*>& names, at::TensorList like,
                         double initial);

} // namespace xsoftmax
