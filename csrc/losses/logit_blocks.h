#pragma once

#include "core/dtypes.h"
#include "losses/class_blocks.h"
#include "losses/logit_transform.h"
#include "losses/softmax_rows.h"

namespace xsoftmax {

/// LogitOptions applied to blocks of products on the CPU, in place. A: their dtype, float or double.
template <typename A>
class BlockTransform {
 public:
  BlockTransform(const LogitOptions& options, const LinearOperands& operands)
      : active_(transforms(options)), transform_{A(options.logit_scale), A(options.softcap)},
        bias_(operands.bias.defined() ? const_data<A>(operands.bias) : nullptr) {}

  /// Whether logits are more than the products with the bias added.
  bool active() const { return active_; }
  const RowTransform<A>& rows() const { return transform_; }
  /// The bias that logits still lack after apply(), or nullptr.
  const A* remaining_bias() const { return active_ ? nullptr : bias_; }

  /// Turns the products [Q, size] of a block into logits, bias included; leaves them alone where the transform is not active.
  void apply(const at::Tensor& products, const ClassBlock& block) const {
    if (!active_) {
      return;
    }
    const A* bias = bias_ == nullptr ? nullptr : bias_ + block.begin;
    at::parallel_for(0, products.size(0), kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        A* row = data<A>(products) + q * products.stride(0);
        softmax_rows().of(row).transform(row, bias, transform_, block.size);
      }
    });
  }

  /// The derivative of a logit for its score.
  A derivative(A logit) const {
    const A ratio = transform_.cap == 0 ? A(0) : logit / transform_.cap;
    return transform_.scale * (1 - ratio * ratio);
  }

 private:
  const bool active_;
  const RowTransform<A> transform_;
  const A* const bias_;
};

} // namespace xsoftmax
