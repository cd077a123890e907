#include "retrieval/search_index.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/long_work.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "retrieval/cell_scan.h"
#include "retrieval/search_basis.h"
#include "table/row_kernels.h"
#include "op/find_op.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSearchIndex = "search_index";
constexpr int64_t kMaxCells = 1 << 20, kMaxWidth = 1 << 15;
constexpr int64_t kRowsPerTask = 4096;
constexpr double kLargest = 0x1p100; // bound of a coordinate, so that float32 bounds are finite

void check_search_index(const Tensor& weight, const OptionalTensor& bias, const Tensor& cell,
                        int64_t num_cells, const OptionalTensor& queries) {
  check::dim(kSearchIndex, "weight", weight, 2);
  check::floating(kSearchIndex, "weight", weight);
  if (is_defined(bias)) {
    check::dim(kSearchIndex, "bias", *bias, 1);
    check::size(kSearchIndex, "bias", *bias, 0, weight.sym_size(0), "weight's rows");
    check::same_dtype(kSearchIndex, "bias", *bias, "weight", weight);
    check::same_device(kSearchIndex, "bias", *bias, "weight", weight);
  }
  check::dim(kSearchIndex, "cell", cell, 1);
  check::size(kSearchIndex, "cell", cell, 0, weight.sym_size(0), "weight's rows");
  check::dtype(kSearchIndex, "cell", cell, at::kInt);
  check::same_device(kSearchIndex, "cell", cell, "weight", weight);
  TORCH_CHECK_VALUE(num_cells >= 1 && num_cells <= kMaxCells, kSearchIndex,
                    ": expected num_cells in [1, ", kMaxCells, "], got ", num_cells);
  TORCH_CHECK_VALUE(weight.sym_size(1) + is_defined(bias) <= kMaxWidth, kSearchIndex,
                    ": expected rows of at most ", kMaxWidth,
                    " coordinates, the bias included, got ", weight.sym_size(1) + is_defined(bias));
  if (is_defined(queries)) {
    check::dim(kSearchIndex, "queries", *queries, 2);
    check::size(kSearchIndex, "queries", *queries, 1, weight.sym_size(1), "weight's columns");
    check::same_dtype(kSearchIndex, "queries", *queries, "weight", weight);
    check::same_device(kSearchIndex, "queries", *queries, "weight", weight);
  }
  TORCH_CHECK_VALUE(weight.sym_size(0) <= int64_t(1) << 34, kSearchIndex,
                    ": expected at most 2^34 classes, got ", weight.sym_size(0));
}

std::vector<Tensor> search_index_meta(const Tensor& weight, const OptionalTensor& bias,
                                      const Tensor& cell, int64_t num_cells,
                                      const OptionalTensor& queries) {
  check_search_index(weight, bias, cell, num_cells, queries);
  const c10::SymInt groups = (weight.sym_size(0) + (kScanLanes - 1) * num_cells) / kScanLanes,
                    width = weight.sym_size(1) + is_defined(bias);
  const int64_t blocks = (num_cells + kScanLanes - 1) / kScanLanes,
                directions = search_directions(width.guard_int(__FILE__, __LINE__));
  const auto real = weight.options().dtype(at::kFloat), integer = weight.options().dtype(at::kLong);
  return {
      at::empty_symint({groups * kScanLanes}, integer),
      at::empty_symint({groups, (width + 3) / 4, kScanLanes, 4}, weight.options().dtype(at::kByte)),
      at::empty_symint({num_cells + 1}, integer),
      at::empty_symint({groups}, real),
      at::empty_symint({blocks, width, kScanLanes}, real),
      at::empty_symint({kBounds, blocks * kScanLanes}, real),
      at::empty({}, real),
      at::empty_symint({directions, width}, weight.options().dtype(at::kDouble)),
      at::empty_symint({groups, directions / 4, kScanLanes, 4}, weight.options().dtype(at::kByte)),
      at::empty_symint({groups}, real)};
}

// Reads rows of a table in float64, with the bias as an additional coordinate.
template <typename T>
class Rows {
  using A = opmath<T>;

 public:
  Rows(const Tensor& weight, const Tensor& bias, double beta)
      : rows_(const_data<T>(weight)), bias_(bias.defined() ? const_data<T>(bias) : nullptr),
        features_(weight.size(1)), beta_(beta), wide_(features_ + 1) {}

  void read(int64_t id, double* out) {
    row_kernels().of(rows_).widen_row(wide_.data(), rows_ + id * features_, features_);
    std::copy_n(wide_.data(), features_, out);
    if (bias_ != nullptr) {
      A bias;
      row_kernels().of(rows_).widen_row(&bias, bias_ + id, 1);
      out[features_] = double(bias) / beta_;
    }
  }

 private:
  const T* rows_;
  const T* bias_;
  int64_t features_;
  double beta_;
  std::vector<A> wide_;
};

class IndexBuilder {
 public:
  IndexBuilder(const Tensor& weight, const OptionalTensor& bias, const Tensor& cell,
               int64_t num_cells, const OptionalTensor& queries)
      : weight_(weight.contiguous()), bias_(is_defined(bias) ? bias->contiguous() : Tensor()),
        queries_(is_defined(queries) && queries->size(0) > 0 ? queries->contiguous() : Tensor()),
        cells_(num_cells), index_(search_index_meta(weight, bias, cell, num_cells, queries)),
        classes_(weight.size(0)), width_(weight.size(1) + is_defined(bias)),
        quads_((width_ + 3) / 4), directions_(search_directions(width_)) {
    for (Tensor& tensor : index_) {
      advise_huge_pages(tensor);
    }
    place(cell.contiguous());
  }

  std::vector<Tensor> build() {
    dispatch_floating(weight_.scalar_type(), [&](auto zero) { build_as<decltype(zero)>(); });
    return index_;
  }

 private:
  // Assigns groups to cells, and lists the classes of each cell by rising id.
  void place(const Tensor& cell) {
    const int32_t* class_cell = cell.const_data_ptr<int32_t>();
    std::vector<int64_t> size(cells_, 0);
    for (int64_t i = 0; i < classes_; ++i) {
      TORCH_CHECK_INDEX(class_cell[i] >= 0 && class_cell[i] < cells_, kSearchIndex,
                        ": expected cells in [0, ", cells_, "), got ", class_cell[i],
                        " at position ", i);
      ++size[class_cell[i]];
    }
    int64_t* start = data<int64_t>(index_[2]);
    start[0] = 0;
    first_.assign(cells_ + 1, 0);
    for (int64_t c = 0; c < cells_; ++c) {
      start[c + 1] = start[c] + (size[c] + kScanLanes - 1) / kScanLanes;
      first_[c + 1] = first_[c] + size[c];
    }
    members_.resize(classes_);
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    for (int64_t i = 0; i < classes_; ++i) {
      members_[next[class_cell[i]]++] = i;
    }
  }

  template <typename T>
  void build_as() {
    const double beta = bias_.defined() ? choose_beta<T>() : 1;
    data<float>(index_[6])[0] = float(beta);
    index_[0].fill_(-1);
    std::fill_n(data<uint8_t>(index_[1]), index_[1].numel(), uint8_t(128));
    index_[3].zero_();
    index_[4].zero_();
    index_[5].zero_();
    std::fill_n(data<uint8_t>(index_[8]), index_[8].numel(), uint8_t(128));
    index_[9].zero_();
    LongWork work(kSearchIndex, cells_);
    if (directions_ > 0) {
      find_directions<T>(beta, work);
    }
    float* reach = data<float>(index_[5]);
    std::fill_n(reach, index_[5].size(1), -std::numeric_limits<float>::infinity());
    std::atomic<int64_t> bad = classes_;
    at::parallel_for(0, cells_,
                     std::max<int64_t>(1, cells_ * kRowsPerTask / std::max<int64_t>(1, classes_)),
                     [&](int64_t begin, int64_t end) {
                       Rows<T> rows(weight_, bias_, beta);
                       for (int64_t c = begin; c < end && !work.stopped(); ++c) {
                         const int64_t wrong = code_cell(rows, c);
                         int64_t known = bad;
                         while (wrong < known && !bad.compare_exchange_weak(known, wrong)) {
                         }
                         work.add(1);
                       }
                     });
    work.check();
    TORCH_CHECK_VALUE(bad == classes_, kSearchIndex,
                      ": expected finite rows and biases, below 2^100, got others for class ",
                      bad.load());
  }

  // Finds directions in which the queries are long, or the rows if there are no queries.
  template <typename T>
  void find_directions(double beta, LongWork& work) {
    Rows<T> rows(queries_.defined() ? queries_ : weight_, queries_.defined() ? Tensor() : bias_,
                 beta);
    const std::vector<double> basis = leading_directions(
        [&](int64_t id, double* out) {
          rows.read(id, out);
          if (queries_.defined() && bias_.defined()) {
            out[width_ - 1] = beta;
          }
        },
        queries_.defined() ? queries_.size(0) : classes_, width_, directions_,
        [&] { return work.stopped(); });
    std::copy(basis.begin(), basis.end(), data<double>(index_[7]));
  }

  // Returns the ratio of the standard deviations of the biases and of a coordinate, rounded to a
  // power of two so that b / beta and its product with beta are exact.
  template <typename T>
  double choose_beta() {
    Rows<T> rows(weight_, bias_, 1);
    std::vector<double> row(width_);
    const int64_t sample = std::min<int64_t>(classes_, 4096),
                  step = std::max<int64_t>(1, classes_ / std::max<int64_t>(1, sample));
    double squares = 0, bias_sum = 0, bias_squares = 0, count = 0;
    for (int64_t i = 0; i < classes_ && count < sample; i += step, ++count) {
      rows.read(i, row.data());
      squares += std::inner_product(row.begin(), row.end() - 1, row.begin(), 0.0);
      bias_sum += row[width_ - 1];
      bias_squares += row[width_ - 1] * row[width_ - 1];
    }
    const double variance = bias_squares / count - (bias_sum / count) * (bias_sum / count),
                 row_variance = squares / (count * std::max<int64_t>(1, width_ - 1));
    const double ratio = std::sqrt(variance / row_variance);
    return ratio > 0x1p-40 && ratio < 0x1p40 ? std::exp2(std::round(std::log2(ratio))) : 1;
  }

  // Encodes a cell. Returns the first class with a coordinate that is not finite or too large; the
  // number of classes if there is none.
  template <typename T>
  int64_t code_cell(Rows<T>& rows, int64_t c) {
    const int64_t size = first_[c + 1] - first_[c];
    if (size == 0) {
      return classes_;
    }
    const int64_t* member = members_.data() + first_[c];
    // Remainders are recomputed in float64 whenever they are needed, because a cell may be large.
    std::vector<double> centre(width_, 0.0), row(width_);
    for (int64_t j = 0; j < size; ++j) {
      rows.read(member[j], row.data());
      for (int64_t d = 0; d < width_; ++d) {
        if (!(std::abs(row[d]) < kLargest)) {
          return member[j];
        }
        centre[d] += row[d] / double(size);
      }
    }
    float* cell_centre =
        data<float>(index_[4]) + (c / kScanLanes) * width_ * kScanLanes + c % kScanLanes;
    double centre_square = 0;
    for (int64_t d = 0; d < width_; ++d) {
      cell_centre[d * kScanLanes] = float(centre[d]);
      centre[d] = cell_centre[d * kScanLanes];
      centre_square += centre[d] * centre[d];
    }
    const auto remainder = [&](int64_t id) {
      rows.read(id, row.data());
      double square = 0;
      for (int64_t d = 0; d < width_; ++d) {
        row[d] -= centre[d];
        square += row[d] * row[d];
      }
      return square;
    };
    double largest = 0;
    std::vector<std::pair<double, int64_t>> by_norm(size);
    for (int64_t j = 0; j < size; ++j) {
      by_norm[j] = {-std::sqrt(remainder(member[j])), member[j]};
      for (const double x : row) {
        largest = std::max(largest, std::abs(x));
      }
    }
    std::sort(by_norm.begin(), by_norm.end());
    const float scale = std::max(above(largest / 127), 0x1p-100f);
    const int64_t group = data<int64_t>(index_[2])[c];
    int64_t* order = data<int64_t>(index_[0]) + group * kScanLanes;
    uint8_t* codes = data<uint8_t>(index_[1]) + group * quads_ * 4 * kScanLanes;
    // Bound, relative to |z|, of the rounding errors of z.c in float32 and of a score in float64,
    // with a safety margin.
    const double rounding =
        double(width_ + 8) * 0x1p-23 * std::sqrt(centre_square) - by_norm[0].first * 1e-6;
    double error = 0, norm = 0;
    for (int64_t j = 0; j < size; ++j) {
      const int64_t id = by_norm[j].second;
      order[j] = id;
      if (j % kScanLanes == 0) {
        data<float>(index_[3])[group + j / kScanLanes] = above(-by_norm[j].first * (1 + 1e-12));
      }
      remainder(id);
      double error_square = 0, norm_square = 0;
      uint8_t* code = codes + (j / kScanLanes) * quads_ * 4 * kScanLanes + (j % kScanLanes) * 4;
      for (int64_t d = 0; d < width_; ++d) {
        const double nearest = std::clamp(std::nearbyint(row[d] / scale), -127.0, 127.0),
                     decoded = nearest * scale;
        code[(d / 4) * 4 * kScanLanes + d % 4] = uint8_t(int(nearest) + 128);
        error_square += (row[d] - decoded) * (row[d] - decoded);
        norm_square += decoded * decoded;
      }
      error = std::max(error, error_square);
      norm = std::max(norm, norm_square);
    }
    if (directions_ > 0) {
      code_coarsely(c, by_norm, rounding, remainder, row);
    }
    set(c, kReach, above(-by_norm[0].first + rounding));
    set(c, kScale, scale);
    set(c, kCodeError, above(std::sqrt(error) + rounding));
    set(c, kCodeNorm, above(std::sqrt(norm) * (1 + 1e-12)));
    set(c, kSize, float(size));
    return classes_;
  }

  // Encodes the coordinates of the remainders of a cell in the basis. `remainder` writes the
  // remainder of a class to `row`, and returns its squared length.
  template <typename Remainder>
  void code_coarsely(int64_t c, const std::vector<std::pair<double, int64_t>>& by_norm,
                     double rounding, const Remainder& remainder, const std::vector<double>& row) {
    const int64_t size = int64_t(by_norm.size()), group = data<int64_t>(index_[2])[c];
    const double* basis = data<double>(index_[7]);
    float* tail = data<float>(index_[9]) + group;
    std::vector<double> coordinates(size * directions_);
    double largest = 0;
    for (int64_t j = 0; j < size; ++j) {
      const double square = remainder(by_norm[j].second);
      double of_coordinates = 0;
      for (int64_t i = 0; i < directions_; ++i) {
        const double x = cell_scan().dot(row.data(), basis + i * width_, width_);
        of_coordinates += x * x;
        coordinates[j * directions_ + i] = x;
        largest = std::max(largest, std::abs(x));
      }
      float& of_group = tail[j / kScanLanes];
      of_group = std::max(of_group, above(std::sqrt(remaining_square(square, of_coordinates))));
    }
    const float scale = std::max(above(largest / 127), 0x1p-100f);
    uint8_t* codes = data<uint8_t>(index_[8]) + group * directions_ * kScanLanes;
    double error = 0, norm = 0;
    for (int64_t j = 0; j < size; ++j) {
      uint8_t* code = codes + (j / kScanLanes) * directions_ * kScanLanes + (j % kScanLanes) * 4;
      double error_square = 0, norm_square = 0;
      for (int64_t i = 0; i < directions_; ++i) {
        const double x = coordinates[j * directions_ + i],
                     nearest = std::clamp(std::nearbyint(x / scale), -127.0, 127.0),
                     decoded = nearest * scale;
        code[(i / 4) * 4 * kScanLanes + i % 4] = uint8_t(int(nearest) + 128);
        error_square += (x - decoded) * (x - decoded);
        norm_square += decoded * decoded;
      }
      error = std::max(error, error_square);
      norm = std::max(norm, norm_square);
    }
    set(c, kCoarseScale, scale);
    set(c, kCoarseError, above(std::sqrt(error) + rounding));
    set(c, kCoarseNorm, above(std::sqrt(norm) * (1 + 1e-12)));
  }

  void set(int64_t c, SearchBound which, float value) {
    data<float>(index_[5])[which * index_[5].size(1) + c] = value;
  }

  const Tensor weight_, bias_, queries_;
  const int64_t cells_;
  std::vector<Tensor> index_;
  const int64_t classes_, width_, quads_, directions_;
  std::vector<int64_t> first_, members_;
};

std::vector<Tensor> search_index_cpu(const Tensor& weight, const OptionalTensor& bias,
                                     const Tensor& cell, int64_t num_cells,
                                     const OptionalTensor& queries) {
  check_search_index(weight, bias, cell, num_cells, queries);
  return IndexBuilder(weight, bias, cell, num_cells, queries).build();
}

// Builds the index of a table on a device from a copy on the CPU.
std::vector<Tensor> search_index_elsewhere(const Tensor& weight, const OptionalTensor& bias,
                                           const Tensor& cell, int64_t num_cells,
                                           const OptionalTensor& queries) {
  check_search_index(weight, bias, cell, num_cells, queries);
  static const auto op = find_op<decltype(search_index_cpu)>("xsoftmax::search_index");
  std::vector<Tensor> index =
      op.call(weight.cpu(), is_defined(bias) ? OptionalTensor(bias->cpu()) : bias, cell.cpu(),
              num_cells, is_defined(queries) ? OptionalTensor(queries->cpu()) : queries);
  for (Tensor& tensor : index) {
    tensor = tensor.to(weight.device());
  }
  return index;
}

} // namespace

SearchIndexView::SearchIndexView(const char* op, at::TensorList index, const Tensor& weight,
                                 const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(index.size() == 10, op, ": expected an index of 10 tensors, got ",
                    index.size());
  order = index[0], codes = index[1], start = index[2], radius = index[3], centre = index[4],
  bounds = index[5], beta = index[6], basis = index[7], coarse = index[8], tail = index[9];
  const auto tensor = [&](const char* name, const Tensor& part, int64_t dim, at::ScalarType dtype) {
    check::dim(op, name, part, dim);
    check::dtype(op, name, part, dtype);
    check::same_device(op, name, part, "weight", weight);
    TORCH_CHECK_VALUE(part.is_contiguous(), op, ": expected ", name, " to be contiguous");
  };
  tensor("index[0]", order, 1, at::kLong);
  tensor("index[1]", codes, 4, at::kByte);
  tensor("index[2]", start, 1, at::kLong);
  tensor("index[3]", radius, 1, at::kFloat);
  tensor("index[4]", centre, 3, at::kFloat);
  tensor("index[5]", bounds, 2, at::kFloat);
  tensor("index[6]", beta, 0, at::kFloat);
  tensor("index[7]", basis, 2, at::kDouble);
  tensor("index[8]", coarse, 4, at::kByte);
  tensor("index[9]", tail, 1, at::kFloat);
  width = weight.size(1) + is_defined(bias), quads = (width + 3) / 4;
  cells = start.size(0) - 1, blocks = (cells + kScanLanes - 1) / kScanLanes,
  groups = radius.size(0), directions = search_directions(width);
  TORCH_CHECK_VALUE(cells >= 1, op, ": expected index[2] of at least 2 numbers, got ",
                    start.size(0));
  const auto sizes = [&](const char* name, const Tensor& part, at::IntArrayRef expected) {
    TORCH_CHECK_VALUE(part.sizes() == expected, op, ": expected ", name, " of shape ", expected,
                      ", got ", part.sizes());
  };
  sizes("index[0]", order, {groups * kScanLanes});
  sizes("index[1]", codes, {groups, quads, kScanLanes, 4});
  sizes("index[4]", centre, {blocks, width, kScanLanes});
  sizes("index[5]", bounds, {kBounds, blocks * kScanLanes});
  sizes("index[7]", basis, {directions, width});
  sizes("index[8]", coarse, {groups, directions / 4, kScanLanes, 4});
  sizes("index[9]", tail, {groups});
}

void SearchIndexView::check_starts(const char* op) const {
  const int64_t* first = start.const_data_ptr<int64_t>();
  for (int64_t c = 0; c < cells; ++c) {
    TORCH_CHECK_VALUE(first[c] >= 0 && first[c] <= first[c + 1] && first[c + 1] <= groups, op,
                      ": expected index[2] to rise from 0 to at most ", groups, ", got ", first[c],
                      " and ", first[c + 1], " at position ", c);
  }
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "search_index(Tensor weight, Tensor? bias, Tensor cell, int num_cells, Tensor? queries=None) "
      "-> Tensor[]");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("search_index", search_index_elsewhere);
}
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("search_index", search_index_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("search_index", search_index_meta); }

} // namespace xsoftmax
