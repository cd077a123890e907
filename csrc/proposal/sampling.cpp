#include "proposal/sampling.h"

#include "op/checks.h"

#include <ATen/ops/_unique2.h>
#include <ATen/ops/empty.h>

namespace xsoftmax {

void check_sampling(const char* op, const at::Tensor& seed,
                    const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples) {
  check::int64(op, "seed", seed);
  TORCH_CHECK_VALUE(
      seed.dim() == 0 || (seed.dim() == 1 && seed.sym_size(0) == 2 && num_queries.has_value()), op,
      ": expected seed of shape [], or [2] with the number of the first query for draws of each "
      "query, got shape ",
      seed.sym_sizes(), num_queries.has_value() ? "" : " for draws that the batch shares");
  TORCH_CHECK_VALUE(!num_queries.has_value() || *num_queries >= 0, op,
                    ": expected num_queries of at least 0, got ", *num_queries);
  TORCH_CHECK_VALUE(num_samples >= 0, op, ": expected num_samples of at least 0, got ",
                    num_samples);
}

at::Tensor empty_samples(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                         const c10::SymInt& num_samples) {
  return num_queries.has_value() ? at::empty_symint({*num_queries, num_samples}, seed.options())
                                 : at::empty_symint({num_samples}, seed.options());
}

at::Tensor checked_classes(const char* owner, const char* argument, const OptionalTensor& classes,
                           int64_t num_classes) {
  if (!is_defined(classes)) {
    return at::empty({0}, at::kLong);
  }
  TORCH_CHECK_VALUE(classes->dim() == 1 && classes->scalar_type() == at::kLong, owner,
                    ": expected ", argument, " as int64 ids with 1 dimension, got ",
                    check::name(classes->scalar_type()), " of shape ", classes->sizes());
  const at::Tensor ids = std::get<0>(at::_unique2(classes->detach()));
  const int64_t count = ids.numel();
  if (count > 0) {
    const int64_t smallest = ids[0].item<int64_t>(), largest = ids[count - 1].item<int64_t>();
    TORCH_CHECK_INDEX(smallest >= 0 && largest < num_classes, owner, ": expected ", argument,
                      " in [0, ", num_classes, "), got ids from ", smallest, " to ", largest);
  }
  return ids;
}

} // namespace xsoftmax
