#include "table/row_gradient.h"

#include "cpu/memory.h"
#include "table/row_tables.h"
#include "op/shape_checks.h"

#include <ATen/Parallel.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <cstring>

namespace xsoftmax {

RowGradients row_gradients_meta(const at::Tensor& input, const c10::SymInt& rows,
                                std::array<bool, 3> wanted,
                                const std::optional<c10::SymInt>& table_rows) {
  const auto [want_input, want_weight, want_bias] = wanted;
  const c10::SymInt no_pair(0), values = table_rows.value_or(rows);
  return {at::empty_symint({want_input ? input.sym_size(0) : no_pair, input.sym_size(1)},
                           input.options()),
          at::empty_symint({(want_weight || want_bias) && !table_rows ? rows : no_pair},
                           input.options().dtype(at::kLong)),
          at::empty_symint({want_weight ? values : no_pair, input.sym_size(1)}, input.options()),
          at::empty_symint({want_bias ? values : no_pair}, input.options())};
}

bool is_row_sparse(std::optional<bool> sparse_grad, const c10::SymInt& rows,
                   const at::Tensor& table) {
  const auto form = sparse_grad ? sparse_grad : fixed_row_gradient(table);
  const bool sparse = form ? *form : rows <= table.sym_size(0);
  set_row_gradient(table, sparse);
  return sparse;
}

std::vector<at::Tensor> table_gradients_as_grads(const RowGradients& gradients,
                                                 std::array<bool, 3> wanted) {
  const auto& [grad_input, rows, values, bias_values] = gradients;
  return {wanted[0] ? grad_input : at::Tensor(), wanted[1] ? values : at::Tensor(),
          wanted[2] ? bias_values : at::Tensor()};
}

std::vector<at::Tensor> row_gradients_as_grads(const RowGradients& gradients,
                                               const at::Tensor& table, std::array<bool, 3> wanted,
                                               std::optional<bool> sparse_grad) {
  const auto& [grad_input, rows, values, bias_values] = gradients;
  const c10::SymInt num_rows = table.sym_size(0);
  const bool sparse = is_row_sparse(sparse_grad, rows.sym_size(0), table);
  return {wanted[0] ? grad_input : at::Tensor(),
          wanted[1] ? row_gradient_tensor(rows, values, num_rows, sparse) : at::Tensor(),
          wanted[2] ? row_gradient_tensor(rows, bias_values, num_rows, sparse) : at::Tensor()};
}

namespace {

constexpr int64_t kBytesPerTask = 1 << 17;

// A fast path of row_gradient_tensor, whose six ATen calls take longer than the gradient of a few
// rows.
at::Tensor row_sparse(const at::Tensor& rows, const at::Tensor& values, int64_t num_rows) {
  c10::DimVector size(values.sizes().begin(), values.sizes().end());
  size[0] = num_rows;
  const auto backend =
      values.is_cuda() ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparseCPU;
  at::Tensor sparse =
      at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(backend), values.dtype());
  auto* const impl = static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
  impl->raw_resize_(1, values.dim() - 1, size);
  impl->set_indices_and_values_unsafe(strided_view(rows, {1, rows.size(0)}, {rows.size(0), 1}),
                                      values);
  return sparse;
}

// Dense gradients on the CPU, where index_add_ is single-threaded.
at::Tensor row_dense(const at::Tensor& rows, const at::Tensor& values, int64_t num_rows) {
  c10::DimVector size(values.sizes().begin(), values.sizes().end());
  size[0] = num_rows;
  at::Tensor dense = at::zeros(size, values.options());
  const at::Tensor ids = rows.contiguous(), from = values.contiguous();
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  const int64_t row_bytes = rows.size(0) == 0 ? 0 : int64_t(from.nbytes()) / rows.size(0);
  auto* const to = static_cast<char*>(dense.mutable_data_ptr());
  at::parallel_for(
      0, rows.size(0), std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes)),
      [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          if (i == 0 || id[i] != id[i - 1]) {
            std::memcpy(to + id[i] * row_bytes,
                        static_cast<const char*>(from.const_data_ptr()) + i * row_bytes, row_bytes);
          }
        }
      });
  return dense;
}

} // namespace

at::Tensor row_gradient_tensor(const at::Tensor& rows, const at::Tensor& values,
                               const c10::SymInt& num_rows, bool sparse) {
  c10::SymDimVector size(values.sym_sizes().begin(), values.sym_sizes().end());
  size[0] = num_rows;
  if (sparse && !at::GradMode::is_enabled() && check::is_plain(values) && check::is_plain(rows)) {
    return row_sparse(rows, values, num_rows.expect_int());
  }
  if (sparse) { // not coalesced: equal rows may follow each other
    return at::_sparse_coo_tensor_unsafe_symint(rows.unsqueeze(0), values, size,
                                                values.scalar_type(), at::kSparse, values.device(),
                                                std::nullopt,
                                                /*is_coalesced=*/false);
  }
  if (!at::GradMode::is_enabled() && values.is_cpu() && check::is_plain(values) &&
      check::is_plain(rows)) {
    return row_dense(rows, values, num_rows.expect_int());
  }
  return at::zeros_symint(size, values.options()).index_add_(0, rows, values);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_rows(const at::Tensor& rows) {
  auto [sorted, order] = rows.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor position =
      at::arange(rows.sym_size(0).guard_int(__FILE__, __LINE__), rows.options());
  const at::Tensor changes = sorted.ne(sorted.roll(1)).logical_or(position.eq(0));
  const at::Tensor first =
      rows.numel() == 0 ? position : std::get<0>(position.mul(changes).cummax(0));
  return {sorted, order, first};
}

std::tuple<at::Tensor, at::Tensor> sum_equal_rows(const at::Tensor& rows,
                                                  const at::Tensor& values) {
  auto [sorted, order, first] = sort_rows(rows);
  return {sorted, at::zeros_like(values).index_add_(0, first, values.index_select(0, order))};
}

RowGradients to_dense_rows(const RowGradients& gradients, int64_t num_rows,
                           std::array<bool, 3> wanted) {
  const auto& [grad_input, rows, values, bias_values] = gradients;
  const auto all = [&rows = rows, num_rows](const at::Tensor& tensor, bool wanted) {
    if (!wanted) {
      return tensor;
    }
    c10::DimVector size(tensor.sizes().begin(), tensor.sizes().end());
    size[0] = num_rows;
    return at::zeros(size, tensor.options()).index_add_(0, rows, tensor);
  };
  return {grad_input, rows.new_empty({0}), all(values, wanted[1]), all(bias_values, wanted[2])};
}

RowGradients limit_rows(const RowGradients& gradients, int64_t num_rows) {
  const auto& [grad_input, rows, values, bias_values] = gradients;
  if (rows.size(0) <= num_rows) {
    return gradients;
  }
  RowGradients all =
      to_dense_rows(gradients, num_rows, {false, values.size(0) > 0, bias_values.size(0) > 0});
  std::get<1>(all) = at::arange(num_rows, rows.options());
  return all;
}

} // namespace xsoftmax
