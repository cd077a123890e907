#include "order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace emulator {

void Order::set(const std::string& name) {
  if (name == "forward" || name == "reverse") {
    kind_ = name == "forward" ? Kind::Forward : Kind::Reverse;
    return;
  }
  TORCH_CHECK_VALUE(
      !name.empty() && name.size() < 9 && name.find_first_not_of("0123456789") == std::string::npos,
      "XSOFTMAX_EMULATE_ORDER: expected forward, reverse or a number below 10^8, got \"", name,
      "\"");
  kind_ = Kind::Random;
  random_.seed(unsigned(std::stoul(name)));
}

std::vector<uint32_t> Order::straight(uint32_t count) const {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (kind_ == Kind::Reverse) {
    std::reverse(order.begin(), order.end());
  }
  return order;
}

std::vector<uint32_t> Order::blocks(uint32_t count) {
  std::vector<uint32_t> order = straight(count);
  if (kind_ == Kind::Random) {
    std::shuffle(order.begin(), order.end(), random_);
  }
  return order;
}

// Either any thread before any other, or one warp far ahead of another with its lanes in any order.
// A missing barrier may show in only one of the two.
std::vector<uint32_t> Order::threads(uint32_t count) {
  std::vector<uint32_t> order = straight(count);
  if (kind_ != Kind::Random) {
    return order;
  }
  std::shuffle(order.begin(), order.end(), random_);
  if (random_() % 2 == 0) {
    std::vector<uint32_t> rank((count + 31) / 32);
    std::iota(rank.begin(), rank.end(), 0);
    std::shuffle(rank.begin(), rank.end(), random_);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return rank[a / 32] < rank[b / 32]; });
  }
  return order;
}

} // namespace emulator
