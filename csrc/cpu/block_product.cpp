#include "cpu/block_product.h"

#include "cpu/bf16_pack.h"
#include "cpu/dtypes.h"
#include "cpu/memory.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
namespace blas = at::native::cpublas;

constexpr int64_t kRows = 128; // of left and out per block; with a panel they fit the L2 cache
constexpr int64_t kPanel = 64; // columns of right per packed panel
constexpr int64_t kTermBytes = 4096; // of a row of left per brgemm call
constexpr int64_t kTaskWork = 1 << 22; // multiplications per parallel task
constexpr int64_t kTaskElements = 1 << 15; // elements that a parallel task packs

// Operands are packed into 32-bit cells: a cell is a float32 number, or a pair of bfloat16 numbers
// that are neighbours along the summed dimension. left_rows() returns rows [first, first + rows) of
// left as [rows, cells]; pack_panel() writes columns [first, first + columns) of right as
// [cells, columns].

struct Float32Cells {
  using Cell = float;
  using Element = float;
  static constexpr int64_t kTerms = 1; // per cell

  static void transpose(float* out, int64_t out_stride, const float* in, int64_t in_stride,
                        int64_t rows, int64_t columns) {
    bf16_pack().f32.transpose(reinterpret_cast<uint32_t*>(out), out_stride,
                              reinterpret_cast<const uint32_t*>(in), in_stride, rows, columns);
  }

  static const float* left_rows(const Tensor& left, int64_t first, int64_t rows,
                                std::vector<float>& buffer, std::vector<float>&, int64_t& stride) {
    const int64_t terms = left.size(1);
    const float* from = const_data<float>(left);
    if (left.stride(1) == 1 || terms == 1) {
      stride = left.stride(0);
      return from + first * stride;
    }
    stride = terms;
    buffer.resize(std::max<size_t>(buffer.size(), rows * terms));
    transpose(buffer.data(), terms, from + first, left.stride(1), terms, rows);
    return buffer.data();
  }

  static void pack_panel(float* out, const Tensor& right, int64_t first, int64_t columns,
                         std::vector<float>&) {
    const int64_t terms = right.size(0);
    const float* from = const_data<float>(right);
    if (right.stride(1) == 1 || right.size(1) == 1) {
      for (int64_t k = 0; k < terms; ++k) {
        std::copy_n(from + k * right.stride(0) + first, columns, out + k * columns);
      }
    } else {
      transpose(out, columns, from + first * right.stride(1), right.stride(1), columns, terms);
    }
  }
};

struct Bfloat16Cells {
  using Cell = uint32_t;
  using Element = at::BFloat16;
  static constexpr int64_t kTerms = 2;

  template <typename Function>
  static void dispatch_elements(const Tensor& operand, Function&& function) {
    operand.scalar_type() == at::kBFloat16 ? function(const_data<Bf16>(operand))
                                           : function(const_data<float>(operand));
  }

  static const uint32_t* left_rows(const Tensor& left, int64_t first, int64_t rows,
                                   std::vector<uint32_t>& buffer,
                                   std::vector<uint32_t>& transpose_buffer, int64_t& stride) {
    const int64_t terms = left.size(1), pairs = (terms + 1) / 2;
    const bool rows_contiguous = left.stride(1) == 1 || terms == 1;
    if (rows_contiguous && left.scalar_type() == at::kBFloat16 && terms % 2 == 0 &&
        left.stride(0) % 2 == 0 && reinterpret_cast<uintptr_t>(left.const_data_ptr()) % 4 == 0) {
      stride = left.stride(0) / 2;
      return reinterpret_cast<const uint32_t*>(const_data<Bf16>(left) + first * left.stride(0));
    }
    stride = pairs;
    buffer.resize(std::max<size_t>(buffer.size(), rows * pairs));
    dispatch_elements(left, [&](const auto* from) {
      const auto& pack = bf16_pack().of(from);
      if (rows_contiguous) {
        pack.along_rows(buffer.data(), pairs, from + first * left.stride(0), left.stride(0), rows,
                        terms);
      } else {
        transpose_buffer.resize(std::max<size_t>(transpose_buffer.size(), rows * pairs));
        pack.along_columns(transpose_buffer.data(), rows, from + first, left.stride(1), terms,
                           rows);
        pack.transpose(buffer.data(), pairs, transpose_buffer.data(), rows, pairs, rows);
      }
    });
    return buffer.data();
  }

  static void pack_panel(uint32_t* out, const Tensor& right, int64_t first, int64_t columns,
                         std::vector<uint32_t>& transpose_buffer) {
    const int64_t terms = right.size(0), pairs = (terms + 1) / 2;
    dispatch_elements(right, [&](const auto* from) {
      const auto& pack = bf16_pack().of(from);
      if (right.stride(1) == 1 || right.size(1) == 1) {
        pack.along_columns(out, columns, from + first, right.stride(0), terms, columns);
      } else {
        transpose_buffer.resize(std::max<size_t>(transpose_buffer.size(), columns * pairs));
        pack.along_rows(transpose_buffer.data(), pairs, from + first * right.stride(1),
                        right.stride(1), columns, terms);
        pack.transpose(out, columns, transpose_buffer.data(), pairs, columns, pairs);
      }
    });
  }
};

Tensor with_unit_stride(const Tensor& operand) {
  return operand.stride(0) == 1 || operand.stride(1) == 1 ? operand : operand.contiguous();
}

template <typename Element>
bool probe() {
  constexpr bool kPairs = sizeof(Element) == 2;
  const std::vector<Element> left(2 * 16), right(2 * 16);
  std::vector<float> out(16 * 16);
  try {
    blas::brgemm(16, 16, 2, 2, 16, 16, false, left.data(), right.data(), out.data(), kPairs);
    blas::brgemm_release(kPairs);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

template <typename Cells>
void block_product(const Tensor& out, const Tensor& left_operand, const Tensor& right_operand,
                   bool add) {
  using Cell = typename Cells::Cell;
  using Element = typename Cells::Element;
  constexpr int64_t kTerms = Cells::kTerms, kCellsOfCall = kTermBytes / int64_t(sizeof(Cell));
  const Tensor left = with_unit_stride(left_operand), right = with_unit_stride(right_operand);
  const int64_t rows = left.size(0), terms = left.size(1), columns = right.size(1),
                cells = (terms + kTerms - 1) / kTerms;
  if (rows == 0 || columns == 0 || terms == 0) {
    if (!add) {
      Tensor(out).zero_();
    }
    return;
  }
  const Tensor panels = recycled_empty({cells * columns}, out.options());
  Cell* const packed = reinterpret_cast<Cell*>(panels.mutable_data_ptr<float>());
  at::parallel_for(0, (columns + kPanel - 1) / kPanel,
                   std::max<int64_t>(1, kTaskElements / (terms * kPanel)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<Cell> transpose_buffer;
                     for (int64_t first = begin * kPanel; first < std::min(end * kPanel, columns);
                          first += kPanel) {
                       Cells::pack_panel(packed + first * cells, right, first,
                                         std::min(kPanel, columns - first), transpose_buffer);
                     }
                   });
  float* const to = out.mutable_data_ptr<float>();
  const int64_t out_stride = out.stride(0);
  at::parallel_for(
      0, (rows + kRows - 1) / kRows, std::max<int64_t>(1, kTaskWork / (terms * columns * kRows)),
      [&](int64_t begin, int64_t end) {
        std::vector<Cell> buffer, transpose_buffer;
        for (int64_t first = begin * kRows; first < std::min(end * kRows, rows); first += kRows) {
          const int64_t count = std::min(kRows, rows - first);
          int64_t stride = 0;
          const Cell* from = Cells::left_rows(left, first, count, buffer, transpose_buffer, stride);
          for (int64_t column = 0; column < columns; column += kPanel) {
            const int64_t width = std::min(kPanel, columns - column);
            for (int64_t cell = 0; cell < cells; cell += kCellsOfCall) {
              blas::brgemm(count, width, kTerms * std::min(kCellsOfCall, cells - cell),
                           kTerms * stride, width, out_stride, add || cell > 0,
                           reinterpret_cast<const Element*>(from + cell),
                           reinterpret_cast<const Element*>(packed + column * cells + cell * width),
                           to + first * out_stride + column, /*is_vnni=*/kTerms == 2);
            }
          }
        }
        blas::brgemm_release(kTerms == 2); // releases the AMX tiles of this thread
      });
}

} // namespace

bool has_float32_blocks() {
  static const bool found = probe<float>();
  return found;
}

bool has_bfloat16_blocks() {
  static const bool found = probe<at::BFloat16>();
  return found;
}

void float32_block_product(const Tensor& out, const Tensor& left, const Tensor& right, bool add) {
  block_product<Float32Cells>(out, left, right, add);
}
void bfloat16_block_product(const Tensor& out, const Tensor& left, const Tensor& right, bool add) {
  block_product<Bfloat16Cells>(out, left, right, add);
}

} // namespace xsoftmax
