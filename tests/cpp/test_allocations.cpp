// Operations that must not allocate, checked with a counting operator new. Not built with
// sanitizers, which replace operator new themselves.

#include <xsoftmax/xsoftmax.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <new>
#include <thread>

static thread_local int64_t allocations = 0;

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using torch::Tensor;

// 64 nodes with 64 labels each.
c10::intrusive_ptr<xsoftmax::XRLinear> make_wide() {
  const auto layer = [](int64_t parents) {
    const Tensor child = torch::arange(64).to(torch::kByte).repeat({parents}),
                 value = torch::rand({parents * 64});
    return std::vector<Tensor>{torch::arange(parents + 1) * 64,
                               torch::arange(parents + 1),
                               torch::zeros({parents}, torch::kInt),
                               torch::full({parents}, 63, torch::kByte),
                               child,
                               value};
  };
  return c10::make_intrusive<xsoftmax::XRLinear>(
      1, 1.0, "l3-hinge", torch::arange(64 * 64),
      std::vector<std::vector<Tensor>>{layer(1), layer(64)});
}

void search_allocates_nothing_once_warm() {
  const auto model = make_wide();
  const Tensor offsets = torch::tensor({0, 1}, torch::kLong),
               columns = torch::tensor({0}, torch::kInt), values = torch::tensor({1.0f});
  const auto used = [&](int64_t beam) {
    const int64_t before = allocations;
    const auto [ends, labels, scores] = model->predict(
        offsets, columns, values, xsoftmax::XRLinearPredictOptions().topk(5).beam(beam));
    EXPECT_EQ(labels.size(0), 5);
    return allocations - before;
  };
  const int64_t cold = used(64), wide = used(64), narrow = used(1);
  EXPECT_GT(cold, wide); // the workspace grows
  EXPECT_EQ(wide, narrow);
  const int64_t before = allocations;
  const Tensor labels = torch::empty({1, 5}, torch::kLong), scores = torch::empty({1, 5}),
               ends = torch::empty({2}, torch::kLong);
  const Tensor some_labels = labels.view({-1}).narrow(0, 0, 5),
               some_scores = scores.view({-1}).narrow(0, 0, 5);
  EXPECT_EQ(wide, allocations - before); // the only allocations are the result tensors
}

TEST(XRLinear, ASearchAllocatesNothingOnceWarm) {
  // In a thread of its own, whose workspace no other test has warmed.
  std::thread(search_allocates_nothing_once_warm).join();
}

} // namespace
