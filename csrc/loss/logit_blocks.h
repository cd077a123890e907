#pragma once

#include "cpu/dtypes.h"
#include "loss/class_blocks.h"
#include "estimator/logit_transform.h"
#include "loss/softmax_rows.h"

namespace xsoftmax {

/// Applies LogitOptions to blocks of products on the CPU, in place. A: dtype of the products, float
/// or double.
template <typename A>
class BlockTransform {
 public:
  BlockTransform(const LogitOptions& options, const LinearOperands& operands)
      : active_(transforms(options)), transform_{A(options.logit_scale), A(options.softcap)},
        bias_(operands.bias.defined() ? const_data<A>(operands.bias) : nullptr) {}

  /// Whether the options transform the scores (products plus bias).
  bool active() const { return active_; }
  const RowTransform<A>& rows() const { return transform_; }
  /// Returns the bias that the caller must still add after apply(), or nullptr.
  const A* remaining_bias() const { return active_ ? nullptr : bias_; }

  /// Turns the products [Q, size] of a block into logits, bias included. Does nothing if the
  /// transform is not active.
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

  /// Returns the derivative of a logit with respect to its score.
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
