#include "op/long_work.h"

#include "op/checks.h"
#include "op/operators.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <csignal>
#include <optional>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

namespace xsoftmax {
namespace {

constexpr std::chrono::milliseconds kReportInterval{100};
constexpr int64_t kSignal = 2; // stop value of a SIGINT; a watcher that wants a stop writes 1

std::atomic<uint64_t> interrupts = 0;
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<int64_t*>::is_always_lock_free,
              "a signal handler accesses them");

thread_local LongWork* current_work = nullptr;
thread_local ProgressHandler progress_handler;

/// The watch on a thread's long work, set by watch_long_work().
struct Watch {
  at::Tensor numbers;
  bool sigint = false;
  struct sigaction before = {};
};
thread_local std::optional<Watch> current_watch;

int64_t* progress_numbers() {
  return current_watch.has_value() ? current_watch->numbers.mutable_data_ptr<int64_t>() : nullptr;
}

// The number that the SIGINT handler increments. Only the main thread installs the handler.
std::atomic<int64_t*> stop_of_signal = nullptr;

void on_sigint(int) {
  if (int64_t* const stop = stop_of_signal.load()) {
    __atomic_add_fetch(stop, kSignal, __ATOMIC_RELAXED);
  }
}

// Installs on_sigint if this is the main thread and the process handles SIGINT. A process that
// ignores the signal, or is ended by it, keeps that behaviour.
bool take_sigint(Watch& watch) {
  if (getpid() != pid_t(syscall(SYS_gettid)) || sigaction(SIGINT, nullptr, &watch.before) != 0 ||
      watch.before.sa_handler == SIG_DFL || watch.before.sa_handler == SIG_IGN) {
    return false;
  }
  stop_of_signal = watch.numbers.mutable_data_ptr<int64_t>() + 2;
  struct sigaction action = {};
  action.sa_handler = on_sigint;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGINT, &action, nullptr) == 0;
}

bool end_long_work() {
  if (!current_watch.has_value()) {
    return false;
  }
  const Watch watch = *std::exchange(current_watch, std::nullopt);
  if (watch.sigint) {
    sigaction(SIGINT, &watch.before, nullptr);
    stop_of_signal = nullptr;
  }
  return watch.numbers.const_data_ptr<int64_t>()[2] >= kSignal;
}

void watch_long_work(const at::Tensor& numbers, bool sigint) {
  constexpr const char* op = "watch_long_work";
  check::dim(op, "numbers", numbers, 1);
  check::int64(op, "numbers", numbers);
  check::size(op, "numbers", numbers, 0, 3, "done, total, stop");
  TORCH_CHECK_VALUE(numbers.device().is_cpu() && numbers.is_contiguous(), op,
                    ": expected contiguous numbers on CPU, got others");
  end_long_work();
  current_watch.emplace(Watch{numbers});
  current_watch->sigint = sigint && take_sigint(*current_watch);
}

} // namespace

void interrupt() noexcept { interrupts.fetch_add(1); }

ProgressHandler set_progress_handler(ProgressHandler handler) {
  return std::exchange(progress_handler, std::move(handler));
}

LongWork::LongWork(const char* op, int64_t total)
    : op_(op), outer_(current_work), total_(total),
      reports_progress_(outer_ == nullptr || outer_->total_ == 0), interrupts_(interrupts.load()),
      numbers_(progress_numbers()), last_report_(std::chrono::steady_clock::now()) {
  if (outer_ == nullptr) {
    current_work = this;
  }
  if (reports_progress_ && numbers_ != nullptr) {
    __atomic_store_n(numbers_, 0, __ATOMIC_RELAXED);
    __atomic_store_n(numbers_ + 1, total_, __ATOMIC_RELAXED);
  }
}

LongWork::~LongWork() {
  if (outer_ == nullptr) {
    current_work = nullptr;
  }
}

LongWork* LongWork::current() { return current_work; }

bool LongWork::stop_requested() const {
  return interrupts.load(std::memory_order_relaxed) != interrupts_ ||
      (numbers_ != nullptr && __atomic_load_n(numbers_ + 2, __ATOMIC_RELAXED) != 0);
}

void LongWork::add(int64_t done) {
  if (!reports_progress_) {
    outer_->add(0);
    return;
  }
  const int64_t all = done_ += done;
  if (done != 0 && numbers_ != nullptr) {
    __atomic_store_n(numbers_, all, __ATOMIC_RELAXED);
  }
  if (std::this_thread::get_id() != thread_ || progress_handler == nullptr ||
      std::chrono::steady_clock::now() - last_report_ < kReportInterval) {
    return;
  }
  last_report_ = std::chrono::steady_clock::now();
  try {
    progress_handler(op_, all, total_);
  } catch (...) {
    failed_ = true;
    if (outer_ != nullptr) {
      outer_->failed_ = true;
    }
    throw;
  }
}

void LongWork::check() const {
  if (stopped()) {
    throw Interrupted({__func__, __FILE__, uint32_t(__LINE__)}, std::string(op_) + ": interrupted");
  }
}

XSOFTMAX_OPERATORS(m) {
  m.def("watch_long_work(Tensor(a!) numbers, bool sigint) -> ()");
  m.def("end_long_work() -> bool", end_long_work);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("watch_long_work", watch_long_work);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { // meta tensors have no memory to report to
  m.impl("watch_long_work", [](const at::Tensor&, bool) {
    TORCH_CHECK_TYPE(false, "watch_long_work: expected numbers on CPU, got them on meta");
  });
}

} // namespace xsoftmax
