#include "estimator/estimator_arithmetic.h"

namespace xsoftmax::XS_ISA {
namespace {

// Runs queries [first, last).
template <typename T, RowLoss kLoss>
void run(const LossRows<T>& rows, int64_t first, int64_t last, T* buffer) {
  for (int64_t q = first; q < last; ++q) {
    run_query<kLoss>(SingleLane{}, rows, q, buffer);
  }
}

template <typename T>
constexpr EstimatorRows<T> functions() {
  return {run<T, RowLoss::Softmax>,      run<T, RowLoss::Logistic>,   run<T, RowLoss::OneVsEach>,
          run<T, RowLoss::BlackOut>,     run<T, RowLoss::Importance>, run<T, RowLoss::Cane>,
          run<T, RowLoss::CaneLogOfMean>};
}

} // namespace

extern const EstimatorRowTable estimator_rows{functions<float>(), functions<double>()};

} // namespace xsoftmax::XS_ISA
