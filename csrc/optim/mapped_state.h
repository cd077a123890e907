#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace xsoftmax {

/// Whether steps of the table are to outlive the process: it lies in a file that is open for writing.
bool lies_in_file(const at::Tensor& table);

struct MappedState {
  std::vector<at::Tensor> tensors;
  bool existed; ///< the state of steps before
};

/// What a row optimizer keeps for a table that lies in a file, in a file beside it: `path`.row_adagrad. All of it, the count of steps included, so that an
/// optimizer of another process goes on with nothing else. Made of the shapes of `like`, zeros, or opened where it is there. `rows_op`: of the optimizer,
/// "row_adagrad_rows_". initial: of floating state with a row for each of the table's.
MappedState mapped_state(const at::Tensor& table, std::string rows_op, const std::vector<const char*>& names, at::TensorList like, double initial);

} // namespace xsoftmax
