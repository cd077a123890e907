#include "table/row_terms.h"

#include "op/checks.h"
#include "op/host_reads.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/weak_map.h"
#include "table/candidate_scores.h"
#include "table/row_gradient.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
using Terms = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kRowTerms = "row_terms";

Terms row_terms_meta(const Tensor& grad, const Tensor& ids, const OptionalTensor& scale,
                     int64_t num_classes) {
  check_row_terms(grad, ids, scale, num_classes);
  const c10::SymInt count = ids.sym_numel();
  return {at::empty_symint({count}, ids.options()),
          at::empty_symint({count}, ids.options().dtype(at::kInt)),
          at::empty_symint({count}, grad.options())};
}

// ---- pending terms, waiting for an optimizer

struct Pending {
  std::optional<RowTerms> terms;
  uint32_t version = 0; // autograd version of the queries when the terms were stored
};

struct TermRegistry {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::mutex mutex;
  WeakMap<Weak, Pending> pending_by_table; // tables whose optimizers accept terms
};

TermRegistry& term_registry() {
  static auto* const all =
      new TermRegistry(); // never freed: tensors may outlive static destructors
  return *all;
}

uint32_t version_of(const Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

void accept_row_terms(const Tensor& table) {
  TermRegistry& all = term_registry();
  const std::lock_guard lock(all.mutex);
  if (all.pending_by_table.find(table.unsafeGetTensorImpl()) == nullptr) {
    all.pending_by_table.insert_or_assign(table.unsafeGetTensorImpl(),
                                          TermRegistry::Weak(table.getIntrusivePtr()), {});
  }
}

std::optional<RowTerms> pending_of(const Tensor& table) {
  TermRegistry& all = term_registry();
  const std::lock_guard lock(all.mutex);
  const Pending* const pending = all.pending_by_table.find(table.unsafeGetTensorImpl());
  if (pending == nullptr || !pending->terms.has_value()) {
    return std::nullopt;
  }
  TORCH_CHECK(version_of(pending->terms->input) == pending->version,
              "expected the queries of a loss to stay as they are until the gradient of its table, "
              "whose optimizer has lazy_gradient=True, is zeroed by the "
              "optimizer or read; they were changed in place");
  return pending->terms;
}

std::vector<Tensor> pending_row_terms(const Tensor& table) {
  const auto terms = pending_of(table);
  return terms.has_value()
      ? std::vector<Tensor>{terms->rows, terms->sources, terms->coefficients, terms->input}
      : std::vector<Tensor>{};
}

void write_row_terms(const Tensor& table) {
  const auto terms = pending_of(table);
  if (!terms.has_value()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const Tensor gradient =
      row_gradient_tensor(terms->rows, values_of(*terms), table.sym_size(0), /*sparse=*/true);
  Tensor& grad = table.mutable_grad();
  grad = grad.defined() ? grad.add(gradient) : gradient;
  drop_row_terms(table);
}

} // namespace

void check_row_terms(const Tensor& grad, const Tensor& ids, const OptionalTensor& scale,
                     int64_t num_classes) {
  check::dim(kRowTerms, "grad", grad, 2);
  TORCH_CHECK_TYPE(grad.scalar_type() == at::kFloat || grad.scalar_type() == at::kDouble, kRowTerms,
                   ": expected grad of dtype float32 or float64, got ", grad.scalar_type());
  TORCH_CHECK_VALUE(grad.sym_size(0) <= std::numeric_limits<int32_t>::max(), kRowTerms,
                    ": expected fewer than 2^31 queries, got ", grad.sym_size(0));
  check::dim(kRowTerms, "ids", ids, 2);
  check::int64(kRowTerms, "ids", ids);
  check::same_device(kRowTerms, "ids", ids, "grad", grad);
  check::size(kRowTerms, "ids", ids, 0, grad.sym_size(0), "the rows of grad");
  check::size(kRowTerms, "ids", ids, 1, grad.sym_size(1), "the columns of grad");
  TORCH_CHECK_VALUE(num_classes >= 1, kRowTerms, ": expected num_classes of at least 1, got ",
                    num_classes);
  if (is_defined(scale)) {
    if (scale->dim() != 0) {
      check::dim(kRowTerms, "scale", *scale, 1);
      check::size(kRowTerms, "scale", *scale, 0, grad.sym_size(0), "the rows of grad");
    }
    check::same_dtype(kRowTerms, "scale", *scale, "grad", grad);
    check::same_device(kRowTerms, "scale", *scale, "grad", grad);
  }
}

Terms row_terms_composite(const Tensor& grad, const Tensor& ids, const OptionalTensor& scale,
                          int64_t num_classes) {
  check_row_terms(grad, ids, scale, num_classes);
  if (ids.is_cpu()) {
    check::class_ids(kRowTerms, "ids", ids, num_classes);
  }
  Tensor scaled = grad;
  if (is_defined(scale)) {
    const Tensor factor = expand_to_queries(*scale, grad.sym_size(0)).unsqueeze(1);
    scaled = (grad * factor).masked_fill(grad.eq(0).logical_or(factor.eq(0)), 0);
  }
  const auto [rows, order] = ids.flatten().sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  return {rows, order.div(std::max<int64_t>(1, ids.size(1)), "floor").to(at::kInt),
          scaled.flatten().index_select(0, order)};
}

void drop_row_terms(const Tensor& table) {
  TermRegistry& all = term_registry();
  const std::lock_guard lock(all.mutex);
  if (Pending* const pending = all.pending_by_table.find(table.unsafeGetTensorImpl())) {
    pending->terms.reset();
  }
}

RowTerms row_terms(const Tensor& grad, const Tensor& ids, const OptionalTensor& scale,
                   const Tensor& input, int64_t num_classes) {
  static const auto op = find_op<decltype(row_terms_composite)>("xsoftmax::row_terms");
  const auto [rows, sources, coefficients] = op.call(grad, ids, scale, num_classes);
  return {rows, sources, coefficients, input};
}

Tensor shape_of_values(const RowTerms& terms) {
  const c10::SymInt width = terms.input.sym_size(1);
  return terms.input.new_empty_symint({1, width}).expand_symint({terms.rows.sym_size(0), width});
}

Tensor values_of(const RowTerms& terms) {
  const Tensor coefficients = terms.coefficients.unsqueeze(1);
  const Tensor values =
      terms.input.index_select(0, terms.sources).to(coefficients.scalar_type()).mul_(coefficients);
  return values.masked_fill_(coefficients.eq(0), 0).to(terms.input.scalar_type());
}

bool can_store_row_terms(const Tensor& table) {
  if (!check::on_device(table) || !check::is_plain(table) || !table.is_leaf() ||
      at::GradMode::is_enabled()) {
    return false;
  }
  {
    TermRegistry& all = term_registry();
    const std::lock_guard lock(all.mutex);
    if (all.pending_by_table.find(table.unsafeGetTensorImpl()) == nullptr) {
      return false;
    }
  }
  namespace impl = torch::autograd::impl;
  // Not empty in torch.autograd.grad and in backward(inputs=...).
  const auto* const executed = torch::autograd::get_current_graph_task_exec_info();
  const auto accumulator = impl::try_get_grad_accumulator(table);
  const bool hooked = !impl::hooks(table).empty() || impl::post_acc_grad_hooks(table) != nullptr ||
      (accumulator != nullptr &&
       (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty() ||
        !accumulator->tensor_pre_hooks().empty()));
  if (executed == nullptr || !executed->empty() || hooked) {
    return false;
  }
  write_row_terms(table);
  return !table.grad().defined();
}

void store_row_terms(const Tensor& table, const RowTerms& terms) {
  TermRegistry& all = term_registry();
  const std::lock_guard lock(all.mutex);
  Pending* const pending = all.pending_by_table.find(table.unsafeGetTensorImpl());
  TORCH_CHECK(pending != nullptr, kRowTerms, ": expected a table whose optimizer takes terms");
  *pending = {RowTerms{terms.rows, terms.sources, terms.coefficients, terms.input.detach()},
              version_of(terms.input)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "row_terms(Tensor grad, Tensor ids, Tensor? scale, int num_classes) -> (Tensor rows, Tensor "
      "sources, Tensor coefficients)");
  m.def("accept_row_terms(Tensor table) -> ()", accept_row_terms);
  m.def("pending_row_terms(Tensor table) -> Tensor[]", pending_row_terms);
  m.def("drop_row_terms(Tensor table) -> ()", drop_row_terms);
  m.def("write_row_terms(Tensor table) -> ()", write_row_terms);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("row_terms", row_terms_composite);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("row_terms", row_terms_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("row_terms", torch::autograd::autogradNotImplementedFallback());
}

} // namespace xsoftmax
