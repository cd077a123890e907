#include "matcher/linear_layer.h"

#include "op/checks.h"
#include "table/sparse_rows.h"

#include <c10/util/Half.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename T>
void check_children(const char* op, int64_t begin, int64_t end, const void* child,
                    int64_t children) {
  const T* found = static_cast<const T*>(child);
  for (int64_t e = begin; e < end; ++e) {
    TORCH_CHECK_INDEX(int64_t(found[e]) >= 0 && int64_t(found[e]) < children, op,
                      ": expected child in [0, ", children, "), got ", int64_t(found[e]), " at [",
                      e, "]");
  }
}

template <typename T>
void check_finite(const char* op, const Tensor& value) {
  const T* numbers = value.const_data_ptr<T>();
  for (int64_t e = 0; e < value.size(0); ++e) {
    TORCH_CHECK_VALUE(std::isfinite(float(numbers[e])), op,
                      ": expected value with finite numbers, got ", float(numbers[e]), " at [", e,
                      "]");
  }
}

} // namespace

LinearLayerView linear_layer_view(const char* op, int64_t parents, int64_t features,
                                  const std::vector<Tensor>& parts) {
  const auto &first_child = parts[0], &chunk = parts[1], &feature = parts[2], &more = parts[3],
             &child = parts[4], &value = parts[5];
  check::numbers(op, "first_child", first_child, at::kLong);
  check::numbers(op, "chunk", chunk, at::kLong);
  check::numbers(op, "feature", feature, at::kInt);
  const bool wide = child.scalar_type() == at::kInt, half = value.scalar_type() == at::kHalf;
  check::numbers(op, "child", child, wide ? at::kInt : at::kByte);
  check::numbers(op, "more", more, child.scalar_type());
  check::numbers(op, "value", value, half ? at::kHalf : at::kFloat);
  check::size(op, "first_child", first_child, 0, parents + 1,
              "the nodes of the layer above, and one");
  check::size(op, "chunk", chunk, 0, parents + 1, "the nodes of the layer above, and one");
  check::size(op, "more", more, 0, feature.size(0), "the features");
  check::size(op, "child", child, 0, value.size(0), "the size of value");
  check::offsets(op, "first_child", first_child, first_child[parents].item<int64_t>());
  check::offsets(op, "chunk", chunk, feature.size(0));
  const LinearLayerView view{span_of<int64_t>(first_child),
                             span_of<int64_t>(chunk),
                             span_of<int32_t>(feature),
                             more.const_data_ptr(),
                             child.const_data_ptr(),
                             value.const_data_ptr(),
                             wide,
                             half};
  int64_t entry = 0;
  for (int64_t p = 0; p < parents; ++p) {
    const int64_t children = view.first_child[p + 1] - view.first_child[p], begin = entry;
    int64_t before = -1;
    for (int64_t row = view.chunk[p]; row < view.chunk[p + 1]; ++row) {
      TORCH_CHECK_VALUE(view.feature[row] > before && view.feature[row] <= features, op,
                        ": expected feature to rise in a chunk and to be at most ", features,
                        ", got ", view.feature[row], " after ", before, " at [", row, "]");
      before = view.feature[row];
      TORCH_CHECK_VALUE(view.weights(row) >= 1 && view.weights(row) <= children, op,
                        ": expected more in [0, ", children, "), got ", view.weights(row) - 1,
                        " at [", row, "]");
      entry += view.weights(row);
    }
    TORCH_CHECK_VALUE(entry <= value.size(0), op, ": expected more to add up to the ",
                      value.size(0), " weights, got more than those at [", view.chunk[p + 1] - 1,
                      "]");
    TORCH_CHECK_VALUE(entry - begin <= std::numeric_limits<uint32_t>::max(), op,
                      ": expected at most 2^32 - 1 weights below a node, got ", entry - begin);
    wide ? check_children<int32_t>(op, begin, entry, view.child, children)
         : check_children<uint8_t>(op, begin, entry, view.child, children);
  }
  TORCH_CHECK_VALUE(entry == value.size(0), op, ": expected more to add up to the ", value.size(0),
                    " weights, got ", entry);
  half ? check_finite<at::Half>(op, value) : check_finite<float>(op, value);
  return view;
}

} // namespace xsoftmax
