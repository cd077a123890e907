#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "retrieval/search_cells.cuh"
#include "retrieval/search_products.cuh"
#include "retrieval/search_topk.h"
#include "table/gather_dot_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr const char* kOp = "search_topk";
// Memory for the queries that are searched at once. A single query may take more.
constexpr int64_t kWorkspaceBytes = 256 << 20;
constexpr int64_t kProductBytes = 64 << 20; // memory for the products with a block of classes
constexpr int64_t kMinClasses = 1024, kMaxClasses = 65536; // classes in a block
constexpr int64_t kMaxQueries = 1 << 16; // queries searched at once
constexpr int64_t kBlocks = 1024; // thread blocks that share the cells if queries are few
// Queries per byte of an element up to which searching by cells is cheaper: each query reads about
// a third of the codes (one byte per coordinate), while a pass over all rows of the table is shared
// by all queries.
constexpr int64_t kQueriesPerByte = 3;

// Queries in the forms that the kernels read; nullptr for a form that is not needed.
template <typename T>
struct PreparedQueries {
  SearchQuery* query; // [Q]
  double* wide; // [Q, width], scaled by 2^exponent
  float* row; // [Q, width], the same in float32
  int8_t* code; // [Q, 4 quads]
  Rounded<T>* rounded; // [Q, features]
};

// One warp per query.
template <typename T>
__global__ void prepare_queries_kernel(PreparedQueries<T> out, const T* input, const float* beta,
                                       int64_t queries, int64_t features, int64_t width) {
  const int64_t quads = (width + 3) / 4;
  for (int64_t q = global_thread() / kWarp; q < queries; q += grid_threads() / kWarp) {
    const T* z = input + q * features;
    double most = 0;
    bool finite = true;
    for (int64_t d = lane(); d < features; d += kWarp) {
      const double x = fabs(double(z[d]));
      finite &= x <= std::numeric_limits<double>::max();
      most = x > most ? x : most;
    }
    most = warp_max(most);
    finite = __all_sync(kAllLanes, finite) != 0;
    // `bias_coordinate` is the coordinate of the query that multiplies the bias.
    const double bias_coordinate = width > features ? double(*beta) : 0.0,
                 largest = most > bias_coordinate ? most : bias_coordinate;
    SearchQuery query{};
    query.state = !finite ? kUndefined : largest > 0 ? kSearched : kZero;
    query.exponent = query.state == kSearched ? -ilogb(largest) : 0;
    query.scale = ldexp(query.state == kSearched ? largest : 1.0, query.exponent) / 127;
    const int shift = query.state == kSearched && most > 0 ? -ilogb(most) - query.exponent : 0;
    double square = 0, residual = 0, rounded_square = 0, rounding_residual = 0, scaled_square = 0;
    for (int64_t d = lane(); d < 4 * quads; d += kWarp) {
      const double x = query.state != kSearched || d >= width
          ? 0.0
          : ldexp(d < features ? double(z[d]) : bias_coordinate, query.exponent);
      const double nearest = nearbyint(x / query.scale), error = x - nearest * query.scale;
      square += x * x;
      residual += error * error;
      if (out.code != nullptr) {
        out.code[q * 4 * quads + d] = int8_t(nearest);
      }
      if (d < width) {
        out.wide[q * width + d] = x;
        if (out.row != nullptr) {
          out.row[q * width + d] = float(x);
        }
      }
      if (out.rounded != nullptr && d < features) {
        const double scaled = ldexp(x, shift);
        const Rounded<T> rounded_value = Rounded<T>(float(scaled));
        out.rounded[q * features + d] = rounded_value;
        rounded_square += double(rounded_value) * double(rounded_value);
        rounding_residual += (scaled - double(rounded_value)) * (scaled - double(rounded_value));
        scaled_square += scaled * scaled;
      }
    }
    query.length = sqrt(warp_sum(square)) * (1 + 1e-7);
    query.residual = sqrt(warp_sum(residual)) * (1 + 1e-7);
    // If the factor underflows, the error bound still exceeds the product.
    const double slack = 1 + 1e-6, weight = ldexp(slack, shift < 100 ? -shift : -100);
    query.factor = float(ldexp(1.0, -shift));
    query.residual_error = float(weight * sqrt(warp_sum(scaled_square)) * slack);
    query.norm_error = float(weight * slack *
                             (sqrt(warp_sum(rounding_residual)) +
                              double(features + 16) * 0x1p-22 * sqrt(warp_sum(rounded_square))));
    // Error of values that are flushed to 0; biases are below 2^100.
    query.least_error = query.exponent < -126 ? 0x1p-26f : 1e-33f;
    if (lane() == 0) {
      out.query[q] = query;
    }
  }
}

template <typename T>
struct FoundRows {
  at::opmath_type<T>* scores; // [Q, k]
  int64_t *ids, *cells_read; // [Q, k], [Q]
  bool* certified; // [Q]
};

// Merges the lists of a query and writes the best. One block per query. limited: whether the number
// of cells is limited. of.product is nullptr if all cells were read.
template <typename T>
__global__ void write_found_kernel(FoundRows<T> out, CellQueries cell_queries, CellTable table,
                                   ListStorage lists, RowScorer<T> scorer, int64_t k, int64_t parts,
                                   bool limited) {
  __shared__ CellBatch batch;
  const bool by_cells = cell_queries.product != nullptr;
  for (int64_t q = blockIdx.x; q < cell_queries.queries; q += gridDim.x) {
    const SearchQuery query = cell_queries.query[q];
    if (query.state != kSearched) {
      const bool zero = query.state == kZero;
      for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
        out.scores[q * k + i] =
            zero ? at::opmath_type<T>(0) : std::numeric_limits<at::opmath_type<T>>::quiet_NaN();
        out.ids[q * k + i] = i;
      }
      if (threadIdx.x == 0) {
        out.cells_read[q] = 0;
        out.certified[q] = zero;
      }
      continue;
    }
    scorer.query = cell_queries.wide + q * table.width;
    scorer.exponent = query.exponent;
    SearchList list(lists, q * (parts + 1), k, batch.storage);
    list.load(lists, q * (parts + 1));
    int64_t cells = by_cells ? cell_queries.cells_read[q * (parts + 1)] : table.cells;
    for (int64_t at = q * (parts + 1) + 1; at < (q + 1) * (parts + 1); ++at) {
      SearchList part(lists, at, k, batch.storage);
      part.load(lists, at);
      cells += cell_queries.cells_read[at];
      for (int64_t base = 0; base < part.count; base += blockDim.x) {
        const Candidate mine[1] = {part[base + threadIdx.x]};
        list.add(mine, scorer);
      }
    }
    list.rescore(scorer);
    CUDA_KERNEL_ASSERT(list.count == k); // fails for an index without some of the classes
    for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
      const Candidate one = list[i];
      out.scores[q * k + i] = at::opmath_type<T>(ldexp(one.score, -query.exponent));
      out.ids[q * k + i] = one.id;
    }
    bool remaining = false;
    if (limited) {
      const CellReader<T> reader(cell_queries, table, q, scorer, batch);
      for (int64_t c = threadIdx.x; c < table.cells; c += blockDim.x) {
        remaining |= reader.is_remaining(c, list.threshold);
      }
    }
    remaining = __syncthreads_or(remaining) != 0;
    if (threadIdx.x == 0) {
      out.cells_read[q] = cells;
      out.certified[q] = !remaining;
    }
  }
}

template <typename T>
class CudaSearch {
 public:
  CudaSearch(const Tensor& input, const Tensor& weight, const Tensor& bias,
             const SearchIndexView& index, int64_t k, const SearchOptions& options)
      : input_(input), weight_(weight), beta_(index.beta), table_(index), k_(k),
        max_cells_(options.max_cells.value_or(0)), features_(weight.size(1)),
        scorer_{weight.const_data_ptr<T>(),
                bias.defined() ? bias.const_data_ptr<T>() : nullptr,
                features_,
                weight.size(0),
                nullptr,
                0} {}

  void run(const TopkResult& found) {
    const int64_t queries = input_.size(0);
    const bool by_cells = max_cells_ > 0 || queries <= kQueriesPerByte * int64_t(sizeof(T));
    const int64_t lists = list_capacity(k_) * ListStorage::kBytes,
                  cell_bytes = table_.columns() * (4 + 4 + 1) + table_.quads * 4;
    if (by_cells && max_cells_ == 0) {
      const int64_t room = std::max<int64_t>(1, kWorkspaceBytes / (queries * lists) - 1);
      parts_ = std::clamp<int64_t>(kBlocks / queries, 1, std::min(room, table_.blocks));
    }
    const int64_t bytes =
        (parts_ + 1) * lists + table_.width * (8 + 4) + (by_cells ? cell_bytes : 4 * kMinClasses);
    const int64_t wave =
        std::clamp<int64_t>(kWorkspaceBytes / bytes, 1, std::min(queries, kMaxQueries));
    for (first_ = 0; first_ < queries; first_ += wave) {
      count_ = std::min(wave, queries - first_);
      by_cells ? read_cells(found) : read_rows(found);
    }
  }

 private:
  template <typename X>
  X* memory(at::IntArrayRef sizes, bool zeros = false) {
    const auto options = input_.options().dtype(at::kByte);
    int64_t bytes = sizeof(X);
    for (const int64_t size : sizes) {
      bytes *= size;
    }
    buffers_.push_back(zeros ? at::zeros({bytes}, options) : at::empty({bytes}, options));
    return static_cast<X*>(buffers_.back().mutable_data_ptr());
  }

  ListStorage make_lists() {
    const int64_t lists = count_ * (parts_ + 1), capacity = list_capacity(k_);
    return {memory<double>({lists, capacity}), memory<int64_t>({lists, capacity}),
            memory<float>({lists, capacity}),  memory<double>({lists}),
            memory<int64_t>({lists}),          capacity};
  }

  void prepare(const PreparedQueries<T>& into) {
    prepare_queries_kernel<T>
        <<<grid_size(count_, kThreads / kWarp), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            into, input_.const_data_ptr<T>() + first_ * features_, beta_.const_data_ptr<float>(),
            count_, features_, table_.width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  void write(const TopkResult& found, const CellQueries& cell_queries, const ListStorage& lists) {
    const FoundRows<T> out{std::get<0>(found).mutable_data_ptr<at::opmath_type<T>>() + first_ * k_,
                           std::get<1>(found).mutable_data_ptr<int64_t>() + first_ * k_,
                           std::get<2>(found).mutable_data_ptr<int64_t>() + first_,
                           std::get<3>(found).mutable_data_ptr<bool>() + first_};
    write_found_kernel<T><<<grid_size(count_, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        out, cell_queries, table_, lists, scorer_, k_, parts_, max_cells_ > 0);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    buffers_.clear();
  }

  void read_cells(const TopkResult& found) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const int64_t columns = table_.columns();
    const PreparedQueries<T> prepared{
        memory<SearchQuery>({count_}), memory<double>({count_, table_.width}),
        memory<float>({count_, table_.width}), memory<int8_t>({count_, table_.quads * 4}), nullptr};
    prepare(prepared);
    const CellQueries cell_queries{prepared.query,
                                   prepared.wide,
                                   prepared.row,
                                   reinterpret_cast<const int32_t*>(prepared.code),
                                   memory<float>({count_, columns}),
                                   memory<uint32_t>({count_, columns}),
                                   memory<bool>({count_, columns}, /*zeros=*/true),
                                   memory<int64_t>({count_ * (parts_ + 1)}),
                                   count_};
    const ListStorage lists = make_lists();
    const dim3 grid(grid_size(columns, kThreads), grid_size(count_, kQueriesAtOnce));
    centre_products_kernel<<<grid, kThreads, 0, stream>>>(cell_queries, table_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    first_cells_kernel<T><<<grid_size(count_, 1), kThreads, 0, stream>>>(
        cell_queries, table_, lists, scorer_, k_, parts_, max_cells_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (parts_ > 0) {
      left_cells_kernel<T><<<grid_size(count_ * parts_, 1), kThreads, 0, stream>>>(
          cell_queries, table_, lists, scorer_, k_, parts_);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    write(found, cell_queries, lists);
  }

  void read_rows(const TopkResult& found) {
    const int64_t classes = weight_.size(0);
    const PreparedQueries<T> prepared{memory<SearchQuery>({count_}),
                                      memory<double>({count_, table_.width}), nullptr, nullptr,
                                      memory<Rounded<T>>({count_, features_})};
    prepare(prepared);
    const Tensor queries = typed(buffers_.back(), c10::CppTypeToScalarType<Rounded<T>>::value)
                               .view({count_, features_});
    const ListStorage lists = make_lists();
    const int64_t width = std::min(
        classes,
        std::clamp<int64_t>(kProductBytes / (count_ * 4) / 64 * 64, kMinClasses, kMaxClasses));
    const int64_t blocks = (classes + width - 1) / width;
    float* largest = memory<float>({blocks, 2}, /*zeros=*/true);
    RowBlock<T> block{scorer_.rows,
                      scorer_.bias,
                      nullptr,
                      memory<float>({width}),
                      memory<float>({width}),
                      nullptr,
                      0,
                      0,
                      features_};
    Tensor rounded;
    if constexpr (!std::is_same_v<T, Rounded<T>>) {
      block.rounded = memory<Rounded<T>>({width, features_});
      rounded = typed(buffers_.back(), c10::CppTypeToScalarType<Rounded<T>>::value)
                    .view({width, features_});
    }
    float* products = memory<float>({count_, width});
    const Tensor product = typed(buffers_.back(), at::kFloat);
    for (int64_t i = 0; i < blocks; ++i) {
      block.begin = i * width;
      block.size = std::min(width, classes - block.begin);
      block.largest = largest + 2 * i;
      const Tensor out = product.narrow(0, 0, count_ * block.size).view({count_, block.size});
      round_rows_kernel<T><<<grid_size(block.size, kThreads / kWarp), kThreads, 0,
                             c10::cuda::getCurrentCUDAStream()>>>(block);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      const Tensor rows = rounded.defined() ? rounded.narrow(0, 0, block.size)
                                            : weight_.narrow(0, block.begin, block.size);
      product_out_cuda(out, queries, rows.t());
      fold(block, products, prepared, lists, i == 0);
    }
    CellQueries cell_queries{};
    cell_queries.query = prepared.query, cell_queries.wide = prepared.wide,
    cell_queries.queries = count_;
    write(found, cell_queries, lists);
  }

  void fold(const RowBlock<T>& block, const float* products, const PreparedQueries<T>& prepared,
            const ListStorage& lists, bool first) {
    dispatch_pack<float>(block.size % kPerThread == 0, [&](auto pack) {
      constexpr int N = decltype(pack)::value;
      fold_products_kernel<T, N>
          <<<grid_size(count_, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              block, products, prepared.query, prepared.wide, table_.width, count_, lists, scorer_,
              k_, first);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  static Tensor typed(const Tensor& bytes, at::ScalarType dtype) { return bytes.view(dtype); }

  const Tensor input_, weight_, beta_;
  const CellTable table_;
  const int64_t k_, max_cells_, features_;
  const RowScorer<T> scorer_;
  int64_t parts_ = 0, first_ = 0, count_ = 0;
  std::vector<Tensor> buffers_; // buffers of the current wave
};

TopkResult search_topk_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            at::TensorList index, c10::SymInt k, c10::string_view text) {
  const SearchOptions options =
      check_search_topk(input, weight, bias, k, {text.data(), text.size()});
  const SearchIndexView view(kOp, index, weight,
                             bias); // before the guard, which rejects CPU devices
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return search_topk_reference(input, weight, bias, index, k, text);
  }
  const int64_t queries = input.size(0), count = k.expect_int();
  const auto numbers = input.options().dtype(at::kLong);
  const TopkResult found{
      at::empty({queries, count}, input.options().dtype(opmath_dtype(input.scalar_type()))),
      at::empty({queries, count}, numbers), at::zeros({queries}, numbers),
      at::ones({queries}, input.options().dtype(at::kBool))};
  if (queries == 0 || count == 0) {
    return found;
  }
  const Tensor rows = weight.contiguous(),
               biases = is_defined(bias) ? bias->contiguous() : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "search_topk_cuda", [&] {
        CudaSearch<scalar_t>(input.contiguous(), rows, biases, view, count, options).run(found);
      });
  return found;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("search_topk", search_topk_cuda); }

} // namespace xsoftmax
