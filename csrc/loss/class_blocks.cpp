#include "loss/class_blocks.h"

#include "cpu/dtypes.h"
#include "table/files/mapped_file.h"
#include "op/optional.h"
#include "cpu/products.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

namespace xsoftmax {
namespace {

constexpr int64_t kStep = 64; // block widths are multiples of this
constexpr int64_t kMaxWidth = 8192;
// Bytes of logits and rows of a block that one thread processes. This is a few times the L2 cache:
// a product packs the whole input first, so wider blocks save more time there than the passes over
// the logits lose.
constexpr int64_t kThreadBytes = 4 << 20;
constexpr int64_t kSharedBytes = 16 << 20; // the same if all threads share a block
constexpr int64_t kGroupsBytes = 12 << 20; // limit of the memory of all groups together
constexpr int64_t kMinGroups = 6;          // with fewer, some threads would be idle
constexpr int64_t kMaxGroups = 64;

} // namespace

ClassBlock BlockPlan::block(int64_t i) const {
  const bool is_saved = i < saved_blocks();
  const int64_t begin = is_saved ? i * width : saved + (i - saved_blocks()) * width;
  return {begin, std::min(width, (is_saved ? saved : classes) - begin), is_saved};
}

BlockPlan plan_blocks(int64_t queries, int64_t classes, int64_t features, int64_t saved,
                      int64_t group_bytes, at::ScalarType dtype) {
  const int64_t class_bytes = int64_t(c10::elementSize(dtype)) * (queries + 2 * features) + 1;
  const bool shared = group_bytes > kGroupsBytes / kMinGroups || class_bytes * kStep > kThreadBytes;
  const int64_t width = (shared ? kSharedBytes : kThreadBytes) / class_bytes / kStep * kStep;
  BlockPlan plan{classes, saved, std::clamp(width, kStep, kMaxWidth), 1};
  if (!shared) {
    const int64_t fitting = std::min(kMaxGroups, kGroupsBytes / std::max<int64_t>(group_bytes, 1));
    // A power of two, because common thread counts divide it.
    plan.groups =
        int64_t(std::bit_floor(uint64_t(std::max<int64_t>(1, std::min(fitting, plan.count())))));
    // All groups get the same number of blocks, because otherwise some threads would wait for
    // others. This takes slightly narrower blocks.
    const auto rounded = [&] {
      return (plan.count() + plan.groups - 1) / plan.groups * plan.groups;
    };
    while (plan.groups > kMinGroups && rounded() * 4 > plan.count() * 5) {
      plan.groups /= 2;
    }
    const int64_t rounds = std::max<int64_t>(1, rounded() / plan.groups);
    const int64_t even = (classes + rounds * plan.groups - 1) / (rounds * plan.groups);
    plan.width = std::clamp((even + kStep - 1) / kStep * kStep, kStep, plan.width);
  }
  return plan;
}

LinearOperands::LinearOperands(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias)
    : weight(weight), dtype(opmath_dtype(input.scalar_type())),
      rounds(uses_bfloat16_operands(weight)),
      factor_dtype(rounds && input.scalar_type() == at::kBFloat16 ? at::kBFloat16 : dtype) {
  this->input = input.to(factor_dtype).contiguous();
  if (is_defined(bias)) {
    this->bias = bias->to(opmath_dtype(input.scalar_type())).contiguous();
  }
}

at::Tensor BlockScratch::view(at::Tensor& buffer, at::ScalarType dtype, int64_t capacity,
                              int64_t rows, int64_t columns) const {
  if (!buffer.defined()) {
    buffer = at::empty({capacity}, operands_.input.options().dtype(dtype));
  }
  return buffer.narrow(0, 0, rows * columns).view({rows, columns});
}

at::Tensor BlockScratch::rows(const ClassBlock& block) {
  // Prefetches the next block of the group while this one is processed.
  const int64_t next = plan_.width * plan_.groups;
  prefetch_range(operands_.weight, block.begin < next ? block.begin : block.begin + next,
                 block.size + (block.begin < next ? next : 0));
  const at::Tensor rows = operands_.weight.narrow(0, block.begin, block.size);
  if (rows.scalar_type() == operands_.factor_dtype) {
    return rows;
  }
  const int64_t features = rows.size(1);
  return view(rows_, operands_.factor_dtype, plan_.width * features, block.size, features)
      .copy_(rows);
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
