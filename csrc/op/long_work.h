#pragma once

#include <xsoftmax/ops.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

// Progress reports and interruption for operators that may run for seconds. Such an operator opens
// a LongWork on the calling thread before its loops:
//
//     LongWork work(op, total);
//     at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
//       // A block should take at most a few tenths of a second.
//       for (int64_t i = begin; i < end && !work.stopped(); ++i) {
//         ...
//         work.add(1);
//       }
//     });
//     work.check();  // before writing anything that the caller keeps
//
// A function that is called both with and without a LongWork open takes LongWork::current() on the
// calling thread, which may be null, and uses the functions in namespace long_work below.
//
// Work is stopped by xsoftmax::interrupt(), by a progress handler that throws, or by a watch on the
// thread. Python uses a watch:
//
// watch_long_work(numbers int64 [3], sigint): from this call until end_long_work() or the next
// watch, long work of this thread writes (done, total) to numbers[0] and numbers[1], and stops when
// numbers[2] is not 0. If `sigint` is set, on the main thread of a process that handles SIGINT, the
// signal is counted in numbers[2]. The previous handler could act only after the operator has
// returned.
//
// end_long_work() -> whether SIGINT was received.

namespace xsoftmax {

class LongWork {
 public:
  /// Opens long work named `op`. total: the sum of all add() calls, or 0 if unknown. Work opened
  /// inside other long work is a part of it, and reports its progress only if the outer total is
  /// unknown.
  explicit LongWork(const char* op, int64_t total = 0);
  ~LongWork();
  LongWork(const LongWork&) = delete;

  /// Returns the outermost long work that is open on this thread, or null.
  static LongWork* current();

  /// Whether the work should stop. May be called from any thread.
  bool stopped() const {
    return outer_ != nullptr ? outer_->stopped()
                             : failed_.load(std::memory_order_relaxed) || stop_requested();
  }
  /// Adds `done` to the progress. May be called from any thread. On the thread that opened the
  /// work, it may call the progress handler and rethrow the handler's exception.
  void add(int64_t done);
  /// Throws Interrupted if the work was stopped.
  void check() const;

 private:
  bool stop_requested() const;

  const char* op_;
  LongWork* const outer_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const int64_t total_;
  const bool reports_progress_; // false: the outer work does
  std::atomic<int64_t> done_ = 0;
  const uint64_t interrupts_; // number of interrupt() calls before this work began
  int64_t* const numbers_; // done, total, stop; or null
  std::atomic<bool> failed_ = false; // the handler threw
  std::chrono::steady_clock::time_point last_report_;
};

/// The methods of LongWork, for a pointer that may be null.
namespace long_work {
inline bool stopped(const LongWork* work) { return work != nullptr && work->stopped(); }
inline void add(LongWork* work, int64_t done) {
  if (work != nullptr) {
    work->add(done);
  }
}
inline void check(const LongWork* work) {
  if (work != nullptr) {
    work->check();
  }
}
} // namespace long_work

} // namespace xsoftmax
