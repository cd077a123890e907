#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

// The members that the indices of all families of adaptive samplers share (adaptive.h), and changes
// of an index's number of classes.

namespace xsoftmax {

/// The members that every family's index has.
struct AdaptiveIndex {
  /// The table with one row per class, for N classes; negative for a class that is never drawn.
  at::Tensor places;
  at::Tensor recent, step;
  at::Tensor order; ///< has one entry per drawable class, in dimension 0
  c10::SymInt dim; ///< width of a row of the class table, without its bias
  c10::SymInt num_classes; ///< exclusive upper bound of ids

  /// Returns whether the index was built from the class table.
  bool known() const;
};

/// The arguments of X_resize and X_grow after the checks that they share. Refers to them.
class ClassChange {
 public:
  /// has_bias: whether the sampler was built with a bias.
  ClassChange(const char* op, int64_t num_classes, const OptionalTensor& rows,
              const OptionalTensor& bias, const AdaptiveIndex& index, bool has_bias);

  /// For X_grow: checks that a bias is that of the new classes or of all.
  void check_new_bias() const;
  /// Returns the bias of the new classes.
  OptionalTensor new_bias() const;
  /// Returns whether the new classes can be appended as recent ones.
  bool can_grow() const;

  /// For X_resize: checks that a bias is that of all classes. Returns whether the new index knows
  /// the class table.
  bool check_known() const;
  /// Returns bool [num_classes]: whether a class is drawn. Checks that at least `least` are.
  at::Tensor check_drawn(int64_t least) const;

  const int64_t added, removed; ///< numbers of classes

 private:
  const char* op_;
  int64_t num_classes_;
  const OptionalTensor &rows_, &bias_;
  const AdaptiveIndex& index_;
  bool has_bias_;
};

} // namespace xsoftmax
