#include "retrieval/vector_code.h"

#include <algorithm>
#include <cmath>

namespace xsoftmax {

VectorCode encode(const std::vector<double>& z, int8_t* code) {
  double largest = 0;
  for (const double x : z) {
    largest = std::max(largest, std::abs(x));
  }
  VectorCode result;
  result.scale = largest > 0x1p-1000 ? largest / 127 : 1;
  double square = 0;
  for (size_t d = 0; d < z.size(); ++d) {
    const double nearest = std::nearbyint(z[d] / result.scale),
                 error = z[d] - nearest * result.scale;
    code[d] = int8_t(nearest);
    result.offset += 128 * int64_t(nearest);
    square += error * error;
  }
  result.residual = std::sqrt(square) * (1 + 1e-7);
  return result;
}

} // namespace xsoftmax
