#include "retrieval/search_basis.h"

#include "retrieval/cell_scan.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace xsoftmax {
namespace {

constexpr int64_t kSample = 4096; // rows
constexpr int64_t kPowerIterations = 8; // of the power method; more change the bounds little
constexpr int64_t kBlock = 8; // rows of the matrix of products that share a pass over the sample

// Returns the sum of r r^T over the rows of a sample [count, width].
std::vector<float> outer_products(const std::vector<float>& sample, int64_t count, int64_t width,
                                  const std::function<bool()>& stopped) {
  std::vector<float> sum(width * width, 0.0f);
  at::parallel_for(0, (width + kBlock - 1) / kBlock, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end && !stopped(); ++block) {
      const int64_t first = block * kBlock, last = std::min(first + kBlock, width);
      for (int64_t s = 0; s < count; ++s) {
        const float* row = sample.data() + s * width;
        for (int64_t i = first; i < last; ++i) {
          float* out = sum.data() + i * width;
          const float factor = row[i];
          for (int64_t d = 0; d < width; ++d) {
            out[d] += factor * row[d];
          }
        }
      }
    }
  });
  return sum;
}

// Makes rows [count, width] orthonormal (Gram and Schmidt, twice each, for orthogonality within
// rounding). A row that depends on those before it becomes zero.
void orthonormalize(std::vector<double>& rows, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    double* row = rows.data() + i * width;
    const double before = std::sqrt(cell_scan().dot(row, row, width));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) {
        const double* other = rows.data() + j * width;
        const double product = cell_scan().dot(row, other, width);
        for (int64_t d = 0; d < width; ++d) {
          row[d] -= product * other[d];
        }
      }
    }
    const double length = std::sqrt(cell_scan().dot(row, row, width));
    if (!(length > 1e-9 * before && length > 1e-100 && std::isfinite(length))) {
      std::fill_n(row, width, 0.0);
      continue;
    }
    for (int64_t d = 0; d < width; ++d) {
      row[d] /= length;
    }
  }
}

} // namespace

std::vector<double> leading_directions(const std::function<void(int64_t, double*)>& read,
                                       int64_t count, int64_t width, int64_t directions,
                                       const std::function<bool()>& stopped) {
  const int64_t sampled = std::min(count, kSample);
  std::vector<float> sample(sampled * width, 0.0f);
  std::vector<double> row(width);
  double largest = 0;
  const auto each_row = [&](auto use) {
    for (int64_t s = 0; s < sampled; ++s) {
      read(s * count / sampled, row.data());
      if (std::all_of(row.begin(), row.end(), [](double x) { return std::isfinite(x); })) {
        use(s);
      }
    }
  };
  each_row([&](int64_t) {
    for (const double x : row) {
      largest = std::max(largest, std::abs(x));
    }
  });
  // Scaled, so that squares of float32 neither overflow nor underflow.
  const int exponent = largest > 0 ? -std::ilogb(largest) : 0;
  each_row([&](int64_t s) {
    for (int64_t d = 0; d < width; ++d) {
      sample[s * width + d] = float(std::scalbn(row[d], exponent));
    }
  });
  const std::vector<float> sum = outer_products(sample, sampled, width, stopped);

  std::mt19937 random(0);
  std::vector<double> basis(directions * width), next(directions * width);
  for (double& x : basis) {
    x = double(random()) / double(random.max()) - 0.5;
  }
  orthonormalize(basis, directions, width);
  for (int64_t iteration = 0; iteration < kPowerIterations && !stopped(); ++iteration) {
    at::parallel_for(0, directions, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && !stopped(); ++i) {
        double* out = next.data() + i * width;
        std::fill_n(out, width, 0.0);
        for (int64_t j = 0; j < width; ++j) {
          const double factor = basis[i * width + j];
          const float* from = sum.data() + j * width;
          for (int64_t d = 0; d < width; ++d) {
            out[d] += factor * double(from[d]);
          }
        }
      }
    });
    std::swap(basis, next);
    orthonormalize(basis, directions, width);
  }
  return basis;
}

} // namespace xsoftmax
