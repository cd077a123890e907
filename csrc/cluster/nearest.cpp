#include "cluster/nearest.h"

#include "cluster/nearest_rows.h"
#include "cpu/products.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

namespace xsoftmax {

using at::Tensor;

std::tuple<Tensor, Tensor> nearest_codeword_cpu(const Tensor& rows, const Tensor& codewords) {
  const int64_t k = codewords.size(0), features = rows.size(1);
  const Tensor index = at::empty({rows.size(0)}, rows.options().dtype(at::kLong)),
               distance = at::empty({rows.size(0)}, rows.options());
  const Tensor half = (0.5 * codewords.square().sum(1)).contiguous(),
               columns = codewords.t().contiguous();
  int64_t* indices = index.mutable_data_ptr<int64_t>();
  float* distances = distance.mutable_data_ptr<float>();
  for_row_blocks(rows, k, [&](int64_t begin, const Tensor& x) {
    const Tensor scores = product_in_parts(x, columns);
    const NearestRowTable& kernels = nearest_rows();
    for (int64_t i = 0; i < x.size(0); ++i) {
      float near;
      indices[begin + i] = kernels.best(scores.const_data_ptr<float>() + i * k,
                                        half.const_data_ptr<float>(), k, &near);
      distances[begin + i] = std::max(
          0.0f, kernels.square_sum(x.const_data_ptr<float>() + i * features, features) - 2 * near);
    }
  });
  return {index, distance};
}

} // namespace xsoftmax
