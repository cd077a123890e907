#include "losses/estimator_arithmetic.h"

namespace xsoftmax::XS_ISA {
namespace {

template <typename T>
constexpr EstimatorRows<T> functions() {
  return {run<T, softmax_row<T>, false>, run<T, logistic_row<T>, false>, run<T, one_vs_each_row<T>, true>, run<T, blackout_row<T>, false>,
          run<T, importance_row<T>, false>, run<T, cane_row<T, true>, false>, run<T, cane_row<T, false>, false>};
}

} // namespace

extern const EstimatorRowTable estimator_rows{functions<float>(), functions<double>()};

} // namespace xsoftmax::XS_ISA
