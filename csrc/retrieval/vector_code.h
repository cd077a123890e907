#pragma once

#include <cstdint>
#include <vector>

namespace xsoftmax {

/// The 8-bit code of a vector z: z is approximately scale x code.
struct VectorCode {
  double scale = 1;
  double residual = 0; // |z - scale x code|
  int64_t offset = 0; // contribution of the 128 in the codes of rows to a product
};

/// Writes the code of a finite vector.
VectorCode encode(const std::vector<double>& z, int8_t* code);

} // namespace xsoftmax
