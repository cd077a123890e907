#include "losses/class_blocks.h"

#include "core/dtypes.h"
#include "core/mapped_file.h"
#include "core/optional.h"
#include "core/products.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

namespace xsoftmax {
namespace {

constexpr int64_t kStep = 64; // block widths are multiples of this
constexpr int64_t kMaxWidth = 8192;
// Logits and rows of a block of one thread: some times its L2 cache, since a product first packs the whole input, and the time of
// that falls with the width of blocks faster than the passes over logits slow down.
constexpr int64_t kThreadBytes = 4 << 20;
constexpr int64_t kSharedBytes = 16 << 20; // the same where all threads share a block
constexpr int64_t kGroupsBytes = 12 << 20; // what all groups may hold together
constexpr int64_t kMinGroups = 6;          // fewer would leave threads without work
constexpr int64_t kMaxGroups = 64;

} // namespace

ClassBlock BlockPlan::block(int64_t i) const {
  const bool is_saved = i < saved_blocks();
  const int64_t begin = is_saved ? i * width : saved + (i - saved_blocks()) * width;
  return {begin, std::min(width, (is_saved ? saved : classes) - begin), is_saved};
}

BlockPlan plan_blocks(int64_t queries, int64_t classes, int64_t features, int64_t saved, int64_t group_bytes, at::ScalarType dtype) {
  const int64_t class_bytes = int64_t(c10::elementSize(dtype)) * (queries + 2 * features) + 1;
  const bool shared = group_bytes > kGroupsBytes / kMinGroups || class_bytes * kStep > kThreadBytes;
  const int64_t width = (shared ? kSharedBytes : kThreadBytes) / class_bytes / kStep * kStep;
  BlockPlan plan{classes, saved, std::clamp(width, kStep, kMaxWidth), 1};
  if (!shared) {
    const int64_t fitting = std::min(kMaxGroups, kGroupsBytes / std::max<int64_t>(group_bytes, 1));
    // A power of two, which most numbers of threads divide.
    plan.groups = int64_t(std::bit_floor(uint64_t(std::max<int64_t>(1, std::min(fitting, plan.count())))));
    // As many blocks for each group, or the threads with fewer would wait. Narrower blocks make them even, a little narrower at most.
    const auto rounded = [&] { return (plan.count() + plan.groups - 1) / plan.groups * plan.groups; };
    while (plan.groups > kMinGroups && rounded() * 4 > plan.count() * 5) {
      plan.groups /= 2;
    }
    const int64_t rounds = std::max<int64_t>(1, rounded() / plan.groups);
    const int64_t even = (classes + rounds * plan.groups - 1) / (rounds * plan.groups);
    plan.width = std::clamp((even + kStep - 1) / kStep * kStep, kStep, plan.width);
  }
  return plan;
}

LinearOperands::LinearOperands(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias)
    : weight(weight), dtype(opmath_dtype(input.scalar_type())), rounds(multiplies_bfloat16(weight)),
      factor_dtype(rounds && input.scalar_type() == at::kBFloat16 ? at::kBFloat16 : dtype) {
  this->input = input.to(factor_dtype).contiguous();
  if (given(bias)) {
    this->bias = bias->to(opmath_dtype(input.scalar_type())).contiguous();
  }
}

at::Tensor BlockScratch::view(at::Tensor& buffer, at::ScalarType dtype, int64_t capacity, int64_t rows, int64_t columns) const {
  if (!buffer.defined()) {
    buffer = at::empty({capacity}, operands_.input.options().dtype(dtype));
  }
  return buffer.narrow(0, 0, rows * columns).view({rows, columns});
}

at::Tensor BlockScratch::rows(const ClassBlock& block) {
  const int64_t next = plan_.width * plan_.groups; // the group's next block is read while this one is worked on
  prefetch_range(operands_.weight, block.begin < next ? block.begin : block.begin + next, block.size + (block.begin < next ? next : 0));
  const at::Tensor rows = operands_.weight.narrow(0, block.begin, block.size);
  if (rows.scalar_type() == operands_.factor_dtype) {
    return rows;
  }
  const int64_t features = rows.size(1);
  return view(rows_, operands_.factor_dtype, plan_.width * features, block.size, features).copy_(rows);
}

at::Tensor BlockScratch::logits_buffer(const ClassBlock& block) {
  const int64_t queries = operands_.input.size(0);
  return view(logits_, operands_.dtype, plan_.width * queries, queries, block.size);
}

at::Tensor BlockScratch::rows_buffer(const ClassBlock& block) {
  const int64_t features = operands_.weight.size(1);
  return view(gradient_, operands_.dtype, plan_.width * features, block.size, features);
}

} // namespace xsoftmax
