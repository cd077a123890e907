#include "table/updates/deferred_flushes.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Deferred {
  Tensor param;
  std::vector<Tensor> state;
  FlushTable flush;
};

class DeferredFlushes {
 public:
  static DeferredFlushes& all() {
    static auto* const flushes = new DeferredFlushes; // never freed: outlives static objects
    return *flushes;
  }

  void add(Deferred deferred) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(deferred));
    count_ = waiting_.size();
  }

  /// Removes and returns the entries whose streams are not capturing.
  std::vector<Deferred> take() {
    if (count_ == 0) {
      return {};
    }
    const std::lock_guard lock(mutex_);
    const auto ready = std::stable_partition(
        waiting_.begin(), waiting_.end(),
        [](const Deferred& deferred) { return is_capturing(deferred.param); });
    std::vector<Deferred> taken(std::make_move_iterator(ready),
                                std::make_move_iterator(waiting_.end()));
    waiting_.erase(ready, waiting_.end());
    count_ = waiting_.size();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::vector<Deferred> waiting_;
  std::atomic<size_t> count_ = 0;
};

template <typename Stream>
bool captures(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) { // torch 2.11 may not have it
    return stream.is_capturing();
  }
  return false;
}

} // namespace

bool is_capturing(const Tensor& tensor) {
  const c10::Device device = tensor.device();
  return c10::impl::hasDeviceGuardImpl(device.type()) &&
      captures(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void defer_flush(const Tensor& param, std::vector<Tensor> state, FlushTable flush) {
  DeferredFlushes::all().add({param, std::move(state), flush});
}

void run_deferred_flushes() {
  for (const Deferred& deferred : DeferredFlushes::all().take()) {
    try {
      deferred.flush(deferred.param);
    } catch (const c10::Error&) { // the table has moved and its optimizer is gone: nothing to do
    }
  }
}

} // namespace xsoftmax
