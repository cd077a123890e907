#include <xsoftmax/nn.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kCachedStep = "cached_step";

/// Saves the states of the default generators of the CPU and of a device, so that dropout in the
/// second pass uses the same masks as in the first.
class RandomState {
 public:
  explicit RandomState(at::Device device) {
    save(at::Device(at::kCPU));
    if (!device.is_cpu()) {
      save(device);
    }
  }

  void restore() const {
    for (const auto& [generator, state] : states_) {
      at::Generator written = generator;
      const std::lock_guard<std::mutex> lock(written.mutex());
      written.set_state(state);
    }
  }

 private:
  void save(at::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }

  std::vector<std::pair<at::Generator, Tensor>> states_;
};

/// Restores the state on scope exit, also after an error, so that the next step does not repeat the
/// random numbers of this one.
struct RestoreLater {
  const RandomState& state;
  ~RestoreLater() { state.restore(); }
};

int64_t batch_size(size_t number, const std::vector<Tensor>& inputs) {
  TORCH_CHECK_VALUE(!inputs.empty(), kCachedStep, ": expected inputs of tower ", number,
                    ", got none");
  for (const Tensor& input : inputs) {
    TORCH_CHECK_VALUE(input.dim() > 0 && input.size(0) == inputs[0].size(0), kCachedStep,
                      ": expected inputs of tower ", number, " of one batch size, got shapes ",
                      inputs[0].sizes(), " and ", input.sizes());
  }
  return inputs[0].size(0);
}

std::vector<Tensor> chunk_of(const std::vector<Tensor>& inputs, int64_t begin, int64_t end) {
  std::vector<Tensor> chunk;
  for (const Tensor& input : inputs) {
    chunk.push_back(input.slice(0, begin, end));
  }
  return chunk;
}

/// Calls run(begin, end) for each chunk. An empty batch is one chunk.
template <typename Run>
void each_chunk(int64_t size, int64_t chunk_size, const Run& run) {
  for (int64_t begin = 0; begin < std::max<int64_t>(size, 1); begin += chunk_size) {
    run(begin, std::min(begin + chunk_size, size));
  }
}

} // namespace

Tensor cached_step(const std::function<Tensor(const std::vector<Tensor>&)>& loss,
                   const std::vector<CachedTower>& towers, int64_t chunk_size,
                   const std::function<void(const Tensor&)>& backward) {
  TORCH_CHECK_VALUE(chunk_size >= 1, kCachedStep, ": expected chunk_size of at least 1, got ",
                    chunk_size);
  std::vector<int64_t> sizes;
  for (size_t number = 0; number < towers.size(); ++number) {
    sizes.push_back(batch_size(number, towers[number].inputs));
  }
  std::vector<std::vector<RandomState>> states(towers.size());
  std::vector<Tensor> vectors;
  for (size_t number = 0; number < towers.size(); ++number) {
    const at::NoGradGuard no_grad;
    const auto& [tower, inputs] = towers[number];
    std::vector<Tensor> parts;
    each_chunk(sizes[number], chunk_size, [&](int64_t begin, int64_t end) {
      states[number].emplace_back(inputs[0].device());
      parts.push_back(tower(chunk_of(inputs, begin, end)));
      TORCH_CHECK_VALUE(parts.back().dim() >= 1 && parts.back().size(0) == end - begin, kCachedStep,
                        ": expected tower ", number, " to give ", end - begin,
                        " rows for as many inputs, got shape ", parts.back().sizes());
    });
    vectors.push_back(at::cat(parts));
  }
  for (Tensor& each : vectors) {
    each.requires_grad_();
  }
  const Tensor value = loss(vectors);
  backward ? backward(value) : value.backward();
  for (size_t number = 0; number < towers.size(); ++number) {
    const Tensor& gradient = vectors[number].grad();
    if (!gradient.defined()) { // the loss does not depend on this tower
      continue;
    }
    const auto& [tower, inputs] = towers[number];
    const RandomState after(inputs[0].device());
    const RestoreLater restore{after};
    size_t chunk = 0;
    each_chunk(sizes[number], chunk_size, [&](int64_t begin, int64_t end) {
      states[number][chunk++].restore();
      const Tensor made = tower(chunk_of(inputs, begin, end));
      if (made.requires_grad()) {
        made.backward(gradient.slice(0, begin, end).to(made.scalar_type()));
      }
    });
  }
  return value.detach();
}

} // namespace xsoftmax
