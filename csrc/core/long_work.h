#pragma once

#include <xsoftmax/long_work.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

// What an operator that may run for seconds opens, on the thread that called it, before its loops:
//
//     LongWork work(op, total);
//     at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
//       for (int64_t i = begin; i < end && !work.stopped(); ++i) {       // a block takes at most some tenths of a second
//         ...
//         work.add(1);
//       }
//     });
//     work.check();                                                      // before anything is written that the caller keeps
//
// A function that long work calls, and others as well, takes LongWork::current() on the calling thread, which may be null, and the functions in long_work
// below.
//
// Who stops it: xsoftmax::interrupt(), a progress handler that throws, and who watches the thread, as Python does:
//
// watch_long_work(numbers int64 [3], sigint): until end_long_work(), or another watch, long work of this thread writes to `numbers` what is done and of how
// much, and stops when the third is not 0. With `sigint`, on the main thread of a process that handles SIGINT, the signal is counted there, instead of being
// handled as before, which could only happen when the operator has returned. end_long_work() -> whether it came.

namespace xsoftmax {

class LongWork {
 public:
  /// total: what add() will sum up to; 0: unknown. Inside of other long work it is a part of that, and tells how far it is only where that does not know.
  explicit LongWork(const char* op, int64_t total = 0);
  ~LongWork();
  LongWork(const LongWork&) = delete;

  /// The outermost one that this thread has open, or null.
  static LongWork* current();

  /// From any thread.
  bool stopped() const { return outer_ != nullptr ? outer_->stopped() : failed_.load(std::memory_order_relaxed) || asked_to_stop(); }
  /// From any thread: so much more is done. From the one that opened it, it may call the progress handler, and throw what that does.
  void add(int64_t done);
  /// Throws Interrupted where it is stopped.
  void check() const;

 private:
  bool asked_to_stop() const;

  const char* op_;
  LongWork* const outer_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const int64_t total_;
  const bool tells_; // how far it is: else that in which it is does
  std::atomic<int64_t> done_ = 0;
  const uint64_t interrupts_; // there had been so many when it began
  int64_t* const numbers_;    // done, total, stop; or null
  std::atomic<bool> failed_ = false; // the handler threw
  std::chrono::steady_clock::time_point told_;
};

/// The same where there may be none.
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
