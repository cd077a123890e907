#include "core/bf16_product.h"

#include "core/bf16_pack.h"
#include "core/dtypes.h"
#include "core/memory.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
namespace blas = at::native::cpublas;

constexpr int64_t kRows = 128;    // of left and out at once: with a panel they fit the second cache
constexpr int64_t kPanel = 64;    // columns of right that lie together
constexpr int64_t kTerms = 2048;  // summed by one call
constexpr int64_t kTaskWork = 1 << 22; // products of numbers
constexpr int64_t kTaskElements = 1 << 15; // laid out

// A matrix as pairs along the summed dimension.
int64_t pairs_of(int64_t terms) { return (terms + 1) / 2; }

template <typename Function>
void with_elements(const Tensor& operand, Function&& function) {
  operand.scalar_type() == at::kBFloat16 ? function(const_data<Bf16>(operand)) : function(const_data<float>(operand));
}

// Rows [first, first + rows) of left as [rows, pairs]: a view where it lies so already.
const uint32_t* left_rows(const Tensor& left, int64_t first, int64_t rows, std::vector<uint32_t>& buffer, std::vector<uint32_t>& crossed, int64_t& stride) {
  const int64_t terms = left.size(1), pairs = pairs_of(terms);
  const bool along = left.stride(1) == 1 || terms == 1;
  if (along && left.scalar_type() == at::kBFloat16 && terms % 2 == 0 && left.stride(0) % 2 == 0 &&
      reinterpret_cast<uintptr_t>(left.const_data_ptr()) % 4 == 0) {
    stride = left.stride(0) / 2;
    return reinterpret_cast<const uint32_t*>(const_data<Bf16>(left) + first * left.stride(0));
  }
  stride = pairs;
  buffer.resize(std::max<size_t>(buffer.size(), rows * pairs));
  with_elements(left, [&](const auto* from) {
    const auto& pack = bf16_pack().of(from);
    if (along) {
      pack.along_rows(buffer.data(), pairs, from + first * left.stride(0), left.stride(0), rows, terms);
    } else {
      crossed.resize(std::max<size_t>(crossed.size(), rows * pairs));
      pack.along_columns(crossed.data(), rows, from + first, left.stride(1), terms, rows);
      pack.transpose(buffer.data(), pairs, crossed.data(), rows, pairs, rows);
    }
  });
  return buffer.data();
}

// Columns [first, first + columns) of right as [pairs, columns].
void lay_out_panel(uint32_t* out, const Tensor& right, int64_t first, int64_t columns, std::vector<uint32_t>& crossed) {
  const int64_t terms = right.size(0), pairs = pairs_of(terms);
  with_elements(right, [&](const auto* from) {
    const auto& pack = bf16_pack().of(from);
    if (right.stride(1) == 1 || right.size(1) == 1) {
      pack.along_columns(out, columns, from + first, right.stride(0), terms, columns);
    } else {
      crossed.resize(std::max<size_t>(crossed.size(), columns * pairs));
      pack.along_rows(crossed.data(), pairs, from + first * right.stride(1), right.stride(1), columns, terms);
      pack.transpose(out, columns, crossed.data(), pairs, columns, pairs);
    }
  });
}

Tensor with_unit_stride(const Tensor& operand) { return operand.stride(0) == 1 || operand.stride(1) == 1 ? operand : operand.contiguous(); }

bool probe() {
  const std::vector<at::BFloat16> left(2 * 16), right(2 * 16);
  std::vector<float> out(16 * 16);
  try {
    blas::brgemm(16, 16, 2, 2, 16, 16, false, left.data(), right.data(), out.data(), /*is_vnni=*/true);
    blas::brgemm_release(true);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

} // namespace

bool has_bf16_product() {
  static const bool found = probe();
  return found;
}

void bf16_product(const Tensor& out, const Tensor& given_left, const Tensor& given_right, bool add) {
  const Tensor left = with_unit_stride(given_left), right = with_unit_stride(given_right);
  const int64_t rows = left.size(0), terms = left.size(1), columns = right.size(1), pairs = pairs_of(terms);
  if (rows == 0 || columns == 0 || terms == 0) {
    if (!add) {
      Tensor(out).zero_();
    }
    return;
  }
  const Tensor panels = recycled_empty({pairs * columns}, out.options().dtype(at::kInt));
  uint32_t* const packed = reinterpret_cast<uint32_t*>(panels.mutable_data_ptr<int32_t>());
  at::parallel_for(0, (columns + kPanel - 1) / kPanel, std::max<int64_t>(1, kTaskElements / (terms * kPanel)), [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> crossed;
    for (int64_t first = begin * kPanel; first < std::min(end * kPanel, columns); first += kPanel) {
      lay_out_panel(packed + first * pairs, right, first, std::min(kPanel, columns - first), crossed);
    }
  });
  float* const to = out.mutable_data_ptr<float>();
  const int64_t out_stride = out.stride(0);
  at::parallel_for(0, (rows + kRows - 1) / kRows, std::max<int64_t>(1, kTaskWork / (terms * columns * kRows)), [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> buffer, crossed;
    for (int64_t first = begin * kRows; first < std::min(end * kRows, rows); first += kRows) {
      const int64_t count = std::min(kRows, rows - first);
      int64_t stride = 0;
      const uint32_t* from = left_rows(left, first, count, buffer, crossed, stride);
      for (int64_t column = 0; column < columns; column += kPanel) {
        const int64_t width = std::min(kPanel, columns - column);
        for (int64_t pair = 0; pair < pairs; pair += kTerms / 2) {
          blas::brgemm(count, width, 2 * std::min(kTerms / 2, pairs - pair), 2 * stride, width, out_stride, add || pair > 0,
                       reinterpret_cast<const at::BFloat16*>(from + pair), reinterpret_cast<const at::BFloat16*>(packed + column * pairs + pair * width),
                       to + first * out_stride + column, /*is_vnni=*/true);
        }
      }
    }
    blas::brgemm_release(true); // of this thread: the AMX tiles go back
  });
}

} // namespace xsoftmax
