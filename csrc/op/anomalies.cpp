#include "op/anomalies.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>

namespace xsoftmax::check {

void finite_queries(const char* op, const char* arg, const at::Tensor& queries,
                    const OptionalTensor& target, int64_t ignore_index) {
  using torch::autograd::AnomalyMode;
  if (!AnomalyMode::is_enabled() || !AnomalyMode::should_check_nan() || queries.is_meta() ||
      at::isTensorSubclassLike(queries)) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor bad = queries.isfinite().logical_not();
  if (is_defined(target) && bad.dim() >= 1) {
    at::Tensor counts = target->ne(ignore_index);
    counts = counts.dim() == bad.dim() ? counts.any(-1, /*keepdim=*/true) : counts.unsqueeze(-1);
    bad = bad.logical_and(counts);
  }
  const at::Tensor places = bad.nonzero();
  if (places.size(0) > 0) {
    const at::Tensor place = places[0].cpu();
    at::Tensor value = queries;
    for (int64_t axis = 0; axis < place.size(0); ++axis) {
      value = value.select(0, place[axis].item<int64_t>());
    }
    const int64_t* const begin = place.const_data_ptr<int64_t>();
    TORCH_CHECK_VALUE(false, op, ": expected ", arg, " with finite values, got ",
                      value.item<double>(), " at ", at::IntArrayRef(begin, begin + place.size(0)),
                      " (checked because autograd's anomaly detection is on)");
  }
}

} // namespace xsoftmax::check
