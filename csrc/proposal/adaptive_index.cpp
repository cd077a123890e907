#include "proposal/adaptive_index.h"

#include "op/checks.h"
#include "proposal/adaptive_checks.h"
#include "proposal/recent_classes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>

#include <algorithm>

// Checks of another number of classes, and whether it needs a new index.

namespace xsoftmax {

using at::Tensor;

bool AdaptiveIndex::known() const { return step.item<int64_t>() > 0; }

ClassChange::ClassChange(const char* op, int64_t num_classes, const OptionalTensor& rows,
                         const OptionalTensor& bias, const AdaptiveIndex& index, bool has_bias)
    : added(std::max<int64_t>(0, num_classes - index.places.size(0))),
      removed(std::max<int64_t>(0, index.places.size(0) - num_classes)), op_(op),
      num_classes_(num_classes), rows_(rows), bias_(bias), index_(index), has_bias_(has_bias) {
  TORCH_CHECK_VALUE(index.places.size(0) == index.num_classes.expect_int(), op,
                    ": expected an index of classes that are not numbered by slots");
  check_at_least(op, "num_classes", num_classes, 1);
  if (is_defined(rows)) {
    check_rows(op, "rows", *rows, added, index.dim);
    check::same_device(op, "rows", *rows, "index", index.places);
    check_finite_rows(op, "rows", *rows);
  }
  if (is_defined(bias)) {
    TORCH_CHECK_VALUE(has_bias, op, ": expected no bias, got one");
    check::dim(op, "bias", *bias, 1);
    check::floating(op, "bias", *bias);
    check::same_device(op, "bias", *bias, "index", index.places);
    check_finite_bias(op, bias);
  }
}

void ClassChange::check_new_bias() const {
  TORCH_CHECK_VALUE(!is_defined(bias_) || bias_->size(0) == added || bias_->size(0) == num_classes_,
                    op_, ": expected bias of ", added, " or ", num_classes_, " classes, got ",
                    bias_->size(0));
}

OptionalTensor ClassChange::new_bias() const {
  return is_defined(bias_) ? OptionalTensor(bias_->narrow(0, bias_->size(0) - added, added))
                           : std::nullopt;
}

bool ClassChange::can_grow() const {
  const int64_t drawn = index_.order.size(0);
  const RecentClasses recent(op_, index_.recent, drawn, index_.places.size(0));
  const bool placed =
      !index_.known() || added == 0 || (is_defined(rows_) && (is_defined(bias_) || !has_bias_));
  return placed && removed <= recent.count() &&
      recent.count() + added <= (drawn - recent.count()) / 4;
}

bool ClassChange::check_known() const {
  if (is_defined(bias_)) {
    check::size(op_, "bias", *bias_, 0, num_classes_, "num_classes");
  }
  const bool known = index_.known() && (added == 0 || is_defined(rows_));
  TORCH_CHECK_VALUE(!known || added == 0 || is_defined(bias_) || !has_bias_, op_,
                    ": expected a bias with the rows of classes, got none");
  return known;
}

Tensor ClassChange::check_drawn(int64_t least) const {
  const int64_t before = index_.places.size(0), at_least = std::max<int64_t>(least, 1);
  const Tensor old_places =
      index_.places.view({before, -1}).select(1, 0).narrow(0, 0, std::min(before, num_classes_));
  const Tensor is_drawn =
      at::cat({old_places.ge(0), at::ones({added}, old_places.options().dtype(at::kBool))});
  const int64_t left = is_drawn.sum().item<int64_t>();
  TORCH_CHECK_VALUE(left >= at_least, op_, ": expected num_classes that leave ", at_least,
                    " classes to draw, got ", num_classes_, ", of which ", left, " are drawn");
  return is_drawn;
}

} // namespace xsoftmax
