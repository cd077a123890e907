#include "estimator/estimator_lanes.cuh"

#include "table/cuda_rows.cuh"
#include "cpu/dtypes.h"
#include "op/optional.h"
#include "loss/linear_candidate_loss.h"
#include "estimator/loss_operands.h"
#include "table/gather_dot.h"
#include "table/gather_dot_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// Arguments of the kernels, which process one query at a time. T: element type of the table.
template <typename T>
struct QueryPass {
  using A = at::opmath_type<T>;

  const T* input;
  const T* weight;
  const T* bias;        // nullptr if absent
  const T* shared_bias; // [S], nullptr if absent
  int64_t features, stride, num_classes;
  const int64_t* target;
  const int64_t* private_ids;
  int64_t* row_ids; // [Q, 1 + P] output: target, private ids
  int64_t queries, row_width, ignore_index;
  // [Q, 1 + P + S] with row stride rows.stride. The columns of shared candidates hold the matrix
  // product on entry.
  A* scores;
  A* grad_input; // nullptr if not needed
  // [Q, S]: copy of the gradients of the scores of shared candidates, rounded to T; nullptr if not
  // needed.
  T* shared_grad;
  int64_t shared_grad_stride;
  LossRows<A> rows;
  RowLoss estimator;
  int64_t cached_width; // elements per row in shared memory; 0: rows are not kept there
  int64_t buffer_size;
  A* scratch; // buffers of the blocks in global memory; nullptr: they are in shared memory
  bool wide; // whether rows can be read 16 bytes at a time

  __device__ bool ignored(int64_t q) const { return target[q] == ignore_index; }
  __device__ int64_t id(int64_t q, int64_t j) const {
    return j > 0 ? private_ids[q * (row_width - 1) + j - 1] : ignored(q) ? 0 : target[q];
  }
};

// Writes the scores of the rows of a query, and copies the rows to `cached_rows`. A warp processes
// kRows rows at a time to keep as many loads in flight.
template <int N, typename T, typename Lanes>
__device__ inline void score_rows(const QueryPass<T>& pass, const Lanes& lanes, int64_t q,
                                  T* cached_rows) {
  using A = at::opmath_type<T>;
  // kGroup: number of rows whose ids a warp reads at once.
  constexpr int kRows = 8, kGroup = Lanes::kWarps == 1 ? kWarp : kRows;
  const T* x = pass.input + q * pass.features;
  A* score = pass.scores + q * pass.rows.stride;
  for (int64_t group = lanes.index() / kWarp * kGroup; group < pass.row_width;
       group += Lanes::kWarps * kGroup) {
    const int64_t mine = group + lane();
    const bool have = lane() < kGroup && mine < pass.row_width;
    const int64_t id = have ? pass.id(q, mine) : 0;
    CUDA_KERNEL_ASSERT(!have || (id >= 0 && id < pass.num_classes));
    if (have) {
      pass.row_ids[q * pass.row_width + mine] = id;
    }
    const int members = pass.row_width - group < kGroup ? int(pass.row_width - group) : kGroup;
    A my_score = 0;
#pragma unroll 1
    for (int base = 0; base < members; base += kRows) {
      const T* row[kRows];
      A sum[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) { // repeats the last row if there are fewer
        row[k] = pass.weight +
            __shfl_sync(kAllLanes, id, base + k < members ? base + k : members - 1) * pass.stride;
        sum[k] = 0;
      }
#pragma unroll 1 // the rows already provide enough parallel loads
      for (int64_t d = lane() * N; d < pass.features; d += kWarp * N) {
        Pack<T, N> pack[kRows];
        const auto input_pack = load_pack<N>(x + d);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          pack[k] = load_pack<N>(row[k] + d);
        }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[k] += A(input_pack.values[i]) * A(pack[k].values[i]);
          }
          if (pass.cached_width > 0 && base + k < members) {
            *reinterpret_cast<Pack<T, N>*>(cached_rows + (group + base + k) * pass.cached_width +
                                           d) = pack[k];
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const A total = warp_sum(sum[k]);
        my_score = lane() == base + k ? total : my_score;
      }
    }
    if (have) {
      score[mine] = my_score + (pass.bias == nullptr ? A(0) : A(pass.bias[id]));
    }
  }
}

// Writes out[d .. d + N) = sum_j coefficient[j] * rows(j)[d .. d + N).
template <int N, typename T, typename A, typename Rows>
__device__ inline void sum_rows(A* out, const A* coefficient, int64_t count, int64_t d,
                                const Rows& rows) {
  A sum[N] = {};
#pragma unroll 4
  for (int64_t j = 0; j < count; ++j) {
    const A c = coefficient[j];
    const auto pack = load_pack<N>(rows(j) + d);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // As on the CPU, a row with a coefficient of 0 may hold NaN.
      sum[i] += c == A(0) ? A(0) : c * A(pack.values[i]);
    }
  }
  constexpr int kStored = N * sizeof(A) > 16 ? 16 / int(sizeof(A)) : N;
#pragma unroll
  for (int i = 0; i < N; i += kStored) {
    Pack<A, kStored> pack;
#pragma unroll
    for (int k = 0; k < kStored; ++k) {
      pack.values[k] = sum[i + k];
    }
    *reinterpret_cast<Pack<A, kStored>*>(out + d + i) = pack;
  }
}

// Writes the gradient of the input of a query, reading the rows from `cached_rows` or from the
// table.
template <int N, typename T, typename Lanes>
__device__ inline void sum_input_grad(const QueryPass<T>& pass, const Lanes& lanes, int64_t q,
                                      const T* cached_rows, at::opmath_type<T>* gradient) {
  const auto* coefficient = pass.scores + q * pass.rows.stride;
  const int64_t* ids = pass.row_ids + q * pass.row_width;
#pragma unroll 1
  for (int64_t d = lanes.index() * N; d < pass.features; d += Lanes::kStep * N) {
    if (pass.cached_width > 0) {
      sum_rows<N, T>(gradient, coefficient, pass.row_width, d,
                     [&](int64_t j) { return cached_rows + j * pass.cached_width; });
    } else {
      sum_rows<N, T>(gradient, coefficient, pass.row_width, d,
                     [&](int64_t j) { return pass.weight + ids[j] * pass.stride; });
    }
  }
}

// Processes a query: scores its rows, runs the estimator, and computes the gradient of its input
// from the same rows. `cached_rows`: shared memory for the rows.
template <typename T, typename Lanes>
__device__ inline void run_pass(const QueryPass<T>& pass, const Lanes& lanes, int64_t q,
                                T* cached_rows, at::opmath_type<T>* buffer) {
  using A = at::opmath_type<T>;
  constexpr int kWide = 16 / sizeof(T);
  const int64_t width = 1 + pass.rows.candidates(), shared = width - pass.row_width;
  A* score = pass.scores + q * pass.rows.stride;
  // Lambdas instead of variables, which would increase register pressure.
  const auto gradient = [&] { return pass.grad_input + q * pass.features; };
  const auto rounded = [&] { return pass.shared_grad + q * pass.shared_grad_stride; };
  const bool rounds = pass.shared_grad != nullptr;
  lanes.sync(); // other lanes may still read the shared memory of the previous query
  if (pass.ignored(q)) {
    for (int64_t j = lanes.first(0); j < width; j += Lanes::kStep) {
      score[j] = 0; // also the output of the gradient
    }
    for (int64_t j = lanes.first(0); rounds && j < shared; j += Lanes::kStep) {
      rounded()[j] = T(0);
    }
    for (int64_t d = lanes.first(0); pass.grad_input != nullptr && d < pass.features;
         d += Lanes::kStep) {
      gradient()[d] = 0;
    }
    for (int64_t j = lanes.first(0); j < pass.row_width; j += Lanes::kStep) {
      const int64_t id = pass.id(q, j);
      CUDA_KERNEL_ASSERT(id >= 0 && id < pass.num_classes);
      pass.row_ids[q * pass.row_width + j] = id;
    }
    if (lanes.is_leader()) {
      pass.rows.loss[q] = pass.rows.ignored_loss(q);
    }
    return;
  }
  pass.wide ? score_rows<kWide>(pass, lanes, q, cached_rows)
            : score_rows<1>(pass, lanes, q, cached_rows);
  if (pass.shared_bias != nullptr) {
    for (int64_t j = lanes.first(0); j < shared; j += Lanes::kStep) {
      score[pass.row_width + j] += A(pass.shared_bias[j]);
    }
  }
  lanes.sync();
  run_query(lanes, pass.estimator, pass.rows, q, buffer);
  lanes.sync();
  for (int64_t j = lanes.first(0); rounds && j < shared; j += Lanes::kStep) {
    rounded()[j] = T(score[pass.row_width + j]);
  }
  if (pass.grad_input != nullptr) {
    pass.wide ? sum_input_grad<kWide>(pass, lanes, q, cached_rows, gradient())
              : sum_input_grad<1>(pass, lanes, q, cached_rows, gradient());
  }
}

// One warp per query. Shared memory of a warp: the buffer of the estimator, then the rows. The pack
// width is not a template parameter, because every kernel would compile all estimators again.
template <typename T>
__global__ void warp_queries_kernel(const __grid_constant__ QueryPass<T> pass) {
  using A = at::opmath_type<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const int64_t bytes = pass.buffer_size * int64_t(sizeof(A)) +
      pass.row_width * pass.cached_width * int64_t(sizeof(T));
  unsigned char* mine = shared + warp * bytes;
  for (int64_t q = blockIdx.x * warps + warp; q < pass.queries; q += gridDim.x * warps) {
    run_pass(pass, WarpLanes{}, q, reinterpret_cast<T*>(mine + pass.buffer_size * sizeof(A)),
             reinterpret_cast<A*>(mine));
  }
}

// One block per query.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    block_queries_kernel(const __grid_constant__ QueryPass<T> pass) {
  using A = at::opmath_type<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ double sums[kWarp];
  const int64_t in_shared = pass.scratch == nullptr ? pass.buffer_size : 0;
  A* buffer = pass.scratch == nullptr ? reinterpret_cast<A*>(shared)
                                      : pass.scratch + blockIdx.x * pass.buffer_size;
  for (int64_t q = blockIdx.x; q < pass.queries; q += gridDim.x) {
    run_pass(pass, BlockLanes{sums}, q,
             reinterpret_cast<T*>(reinterpret_cast<A*>(shared) + in_shared), buffer);
  }
}

// Rounds a number of elements up to a multiple of 16 bytes.
template <typename T>
int64_t whole_packs(int64_t elements) {
  constexpr int64_t kPack = 16 / sizeof(T);
  return (elements + kPack - 1) / kPack * kPack;
}

template <typename T>
void launch(QueryPass<T> pass, const Tensor& like) {
  using A = at::opmath_type<T>;
  if (pass.queries == 0) {
    return;
  }
  pass.buffer_size = whole_packs<A>(pass.rows.buffer_size(pass.estimator));
  const int64_t cached_width = pass.grad_input ? whole_packs<T>(pass.features) : 0;
  const RowPlan plan(pass.queries, pass.rows.candidates(), pass.buffer_size * int64_t(sizeof(A)),
                     pass.row_width * cached_width * int64_t(sizeof(T)), like);
  pass.cached_width = plan.keeps_rows_in_shared ? cached_width : 0;
  pass.scratch = plan.scratch_pointer<A>();
  pass.wide = aligned(pass.input, pass.features, sizeof(T)) &&
      aligned(pass.weight, pass.stride, sizeof(T)) &&
      aligned(pass.grad_input, pass.features, sizeof(A));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (plan.block) {
    if (plan.shared > kSharedBytes) {
      // Always the maximum: another thread may set it between this call and the launch.
      C10_CUDA_CHECK(cudaFuncSetAttribute(block_queries_kernel<T>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          int(max_shared_bytes())));
    }
    block_queries_kernel<T><<<plan.grid, plan.threads(), plan.shared_bytes(), stream>>>(pass);
  } else {
    warp_queries_kernel<T><<<plan.grid, plan.threads(), plan.shared_bytes(), stream>>>(pass);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The tensors of a call, as the kernels take them.
struct LinearLossOperands {
  Tensor query, table, bias, targets, private_ids, shared;
  int64_t row_width, shared_width;

  explicit LinearLossOperands(const LinearLossArguments& arguments)
      : query(arguments.input.contiguous()), table(with_unit_column_stride(arguments.weight)),
        bias(is_defined(arguments.bias) ? arguments.bias->contiguous() : Tensor()),
        targets(arguments.target.contiguous()),
        private_ids(is_defined(arguments.candidates.private_ids)
                        ? arguments.candidates.private_ids->contiguous()
                        : targets.new_empty({query.size(0), 0})),
        shared(is_defined(arguments.candidates.shared_ids)
                   ? arguments.candidates.shared_ids->contiguous()
                   : targets.new_empty({0})),
        row_width(1 + private_ids.size(1)), shared_width(shared.size(0)) {}

  // Returns the arguments of the kernels, without those that concern the estimator.
  template <typename T>
  QueryPass<T> pass(const Tensor& row_ids, const Tensor& scores, const Tensor& grad_input,
                    const Tensor& shared_bias, const Tensor& shared_grad) const {
    using A = at::opmath_type<T>;
    const auto pointer = [](const Tensor& tensor) {
      return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
    };
    QueryPass<T> pass{};
    pass.input = pointer(query);
    pass.weight = pointer(table);
    pass.bias = pointer(bias);
    pass.shared_bias = pointer(shared_bias);
    pass.features = query.size(1);
    pass.stride = table.stride(0);
    pass.num_classes = table.size(0);
    pass.target = targets.const_data_ptr<int64_t>();
    pass.private_ids = private_ids.const_data_ptr<int64_t>();
    pass.row_ids = row_ids.mutable_data_ptr<int64_t>();
    pass.queries = query.size(0);
    pass.row_width = row_width;
    pass.scores = scores.mutable_data_ptr<A>();
    pass.grad_input = grad_input.defined() ? grad_input.mutable_data_ptr<A>() : nullptr;
    pass.shared_grad = shared_grad.defined() ? shared_grad.mutable_data_ptr<T>() : nullptr;
    pass.shared_grad_stride = shared_grad.defined() ? shared_grad.stride(0) : 0;
    return pass;
  }
};

CandidateLossState forward_cuda(const LinearLossArguments& arguments, std::array<bool, 2> wanted,
                                bool aligned) {
  const c10::cuda::CUDAGuard guard(arguments.input.device());
  const LinearLossOperands tensors(arguments);
  const Tensor &query = tensors.query, &bias = tensors.bias;
  const int64_t queries = query.size(0), features = query.size(1), row_width = tensors.row_width,
                shared_width = tensors.shared_width;
  const auto floats = query.options().dtype(opmath_dtype(query.scalar_type()));

  // The gradient of the scores overwrites the scores.
  const ScoreColumns layout(row_width, shared_width, aligned);
  const Tensor buffer = at::empty({queries, layout.width.expect_int()}, floats),
               loss = at::empty({queries}, floats);
  const Tensor scores = buffer.narrow(1, layout.padding.expect_int(), row_width + shared_width);
  const Tensor row_ids = at::empty({queries, row_width}, tensors.targets.options());
  const EstimatorArguments estimation(scores, tensors.targets, arguments.candidates,
                                      arguments.options, row_estimator(arguments.options));
  const Tensor grad_input = at::empty({wanted[0] ? queries : 0, features}, floats);
  Tensor shared_rows, shared_bias, shared_grad;
  if (shared_width > 0) {
    shared_rows = tensors.table.index_select(0, tensors.shared);
    shared_bias = bias.defined() ? bias.index_select(0, tensors.shared) : shared_bias;
    product_out_cuda(scores.narrow(1, row_width, shared_width), query, shared_rows.t());
    if (wanted[0] && rounds_coefficients(query.scalar_type())) {
      shared_grad = at::empty({queries, whole_packs<at::BFloat16>(shared_width)}, query.options())
                        .narrow(1, 0, shared_width);
    }
  }
  const LossOperands operands(estimation, scores);
  const Tensor query_scale = LossOperands::plain(arguments.share, scores.scalar_type());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, query.scalar_type(), "linear_candidate_loss_cuda", [&] {
        using A = at::opmath_type<scalar_t>;
        auto pass = tensors.pass<scalar_t>(row_ids, scores, wanted[0] ? grad_input : Tensor(),
                                           shared_bias, shared_grad);
        pass.ignore_index = arguments.options.ignore_index;
        pass.rows = operands.rows<A>(estimation);
        pass.rows.loss = loss.mutable_data_ptr<A>();
        pass.rows.grad_scores = wanted[0] || wanted[1] ? pass.scores : nullptr;
        pass.rows.grad_loss = query_scale.defined() ? query_scale.const_data_ptr<A>() : nullptr;
        pass.estimator = *estimation.estimator.row_loss;
        launch(pass, scores);
      });
  if (wanted[0] && shared_width > 0) {
    product_out_cuda(
        grad_input, shared_grad.defined() ? shared_grad : scores.narrow(1, row_width, shared_width),
        shared_rows, /*add=*/true);
  }
  return {loss, grad_input, wanted[1] ? buffer : buffer.new_empty({0, buffer.size(1)}), row_ids};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("linear_candidate_loss_forward", linear_candidate_loss_forward<forward_cuda>);
}

} // namespace xsoftmax
