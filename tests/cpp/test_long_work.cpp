// Progress handlers and interruption of long-running work, from C++.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

using xsoftmax::LabelTree;

const xsoftmax::TreeFromVectors kForever{.arity = 10, .iterations = 1'000'000};

/// Sets this thread's handler for the duration of a test.
struct Watching {
  explicit Watching(xsoftmax::ProgressHandler handler)
      : before(xsoftmax::set_progress_handler(std::move(handler))) {}
  ~Watching() { xsoftmax::set_progress_handler(std::move(before)); }
  xsoftmax::ProgressHandler before;
};

TEST(LongWork, TellsHowFarItIs) {
  int64_t size = 50'000, calls = 0, last = 0;
  const Watching watching([&](const std::string& work, int64_t done, int64_t total) {
    EXPECT_EQ(work, "label_tree_kmeans_order");
    EXPECT_EQ(total, size);
    EXPECT_GE(done, last);
    last = done;
    ++calls;
  });
  // The handler is called every 100 ms, so a fast machine needs more work.
  while (calls < 2 && size < 10'000'000) {
    size *= 2;
    calls = last = 0;
    LabelTree::from_vectors(torch::randn({size, 16}), {.arity = 10});
  }
  EXPECT_GE(calls, 2);
}

TEST(LongWork, AHandlerThatThrowsStopsIt) {
  const Watching watching(
      [](const std::string&, int64_t, int64_t) { throw std::runtime_error("enough"); });
  EXPECT_THROW(LabelTree::from_vectors(torch::randn({20'000, 16}), kForever), std::runtime_error);
}

TEST(LongWork, InterruptStopsItFromAnotherThread) {
  xsoftmax::interrupt(); // nothing is running, and work that starts later is not affected
  EXPECT_NO_THROW(LabelTree::from_vectors(torch::randn({100, 16}), {.arity = 10}));
  std::chrono::steady_clock::time_point asked;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    asked = std::chrono::steady_clock::now();
    xsoftmax::interrupt();
  });
  EXPECT_THROW(LabelTree::from_vectors(torch::randn({20'000, 16}), kForever),
               xsoftmax::Interrupted);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(1));
  other.join();
}

} // namespace
