#include "table/updates/deferred_flushes.h"

#include "op/host_reads.h"

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
  c10::Device device;
  std::function<void()> work;
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
        [](const Deferred& deferred) { return is_capturing(deferred.device); });
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

std::atomic<RegisterCaptureQuery::CaptureQuery> capture_query = nullptr;

template <typename Stream>
bool captures(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) { // torch 2.11 does not have it
    return stream.is_capturing();
  }
  return false;
}

} // namespace

RegisterCaptureQuery::RegisterCaptureQuery(CaptureQuery query) { capture_query = query; }

bool is_capturing(c10::Device device) {
  const auto query = capture_query.load();
  if (query != nullptr && (!device.is_cpu() || !check::host_can_read())) {
    return query(device);
  }
  return c10::impl::hasDeviceGuardImpl(device.type()) &&
      captures(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void defer_work(c10::Device device, std::function<void()> work) {
  DeferredFlushes::all().add({device, std::move(work)});
}

void defer_flush(const Tensor& param, std::vector<Tensor> state, FlushTable flush) {
  defer_work(param.device(), [param, state = std::move(state), flush] { flush(param); });
}

void run_deferred_flushes() {
  for (const Deferred& deferred : DeferredFlushes::all().take()) {
    try {
      deferred.work();
    } catch (const c10::Error&) { // the table has moved and its optimizer is gone: nothing to do
    }
  }
}

} // namespace xsoftmax
