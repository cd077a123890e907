#include "machine.h"

#include "fiber.h"
#include "order.h"
#include "shared_memory.h"
#include "traffic.h"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace emulator {

BuiltIn built_in;

namespace {

constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr size_t kMaxStaticShared = 48 * 1024, kMaxShared = 227 * 1024;
constexpr uint64_t kMaxBlocks = uint64_t(1) << 24; // more would take hours on the emulator

/// Thrown in device code, and caught where the thread began.
struct Undefined { std::string message; };
/// Thrown in waiting threads when another thread of the block has failed, to unwind their stacks.
struct Abandoned {};

enum class State { Ended, Ready, AtBarrier, InWarp };

struct Thread {
  std::unique_ptr<Fiber> fiber;
  uint3 index;
  unsigned rank = 0; // position in the order of the block
  State state = State::Ended;
  const char* barrier = ""; // the barrier it waits at
  bool predicate = false;
  WarpCall call;
  Bits result;
};

/// The threads that can run, by rank.
class Ready {
 public:
  void add(unsigned rank) { words_[rank / 64] |= uint64_t(1) << rank % 64; }
  void clear() { std::fill(std::begin(words_), std::end(words_), 0); }
  /// Takes out the first, or returns kMaxThreads.
  unsigned take() {
    for (unsigned i = 0; i < kMaxThreads / 64; ++i) {
      if (words_[i] != 0) {
        const unsigned bit = unsigned(std::countr_zero(words_[i]));
        words_[i] &= words_[i] - 1;
        return i * 64 + bit;
      }
    }
    return kMaxThreads;
  }

 private:
  uint64_t words_[kMaxThreads / 64] = {};
};

/// Statistics of a kernel.
struct Counts {
  int64_t launches = 0, blocks = 0, threads = 0;
  Traffic traffic; // if bytes are counted
};

// Only one block runs at a time, even if several host threads launch.
std::mutex machine;
Order order;
SharedMemory shared_memory;
std::vector<Thread> threads(kMaxThreads);
unsigned block_size = 0, unfinished = 0, at_barrier = 0;
/// Lanes that have not ended, and lanes that wait in an intrinsic.
struct Warp { unsigned alive = 0, waiting = 0; } warps[kMaxThreads / kWarp];
Ready ready;
Thread* running = nullptr;
const std::function<void()>* body = nullptr;
std::string failure; // the first failure of the launch
std::map<std::string, Counts> counts;
unsigned max_blocks = 0; // 0: as launched
std::map<std::string, size_t> most_dynamic; // for kernels whose limit the host has changed
// Shared memory of the launch: requested bytes, and the limit including variables that the kernel
// declares.
size_t dynamic_bytes = 0, most_bytes = 0;
bool counts_bytes = false;
std::atomic<bool> capturing = false;
std::string broke_capture;
std::atomic<int64_t> host_allocations = 0;
TrafficCounter traffic;

std::string text(const Where& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}
std::string text(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}
/// Returns the identity of a kernel: its file, and its text without spaces.
std::string in_file(const Where& where, std::string_view kernel) {
  std::string result = std::string(where.file_name()) + ":";
  std::copy_if(kernel.begin(), kernel.end(), std::back_inserter(result),
               [](char c) { return c != ' ' && c != '\n'; });
  return result;
}
bool same(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
      (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

void fail(const std::string& what) {
  if (failure.empty()) {
    const uint3 b = built_in.block, t = running == nullptr ? uint3{} : running->index;
    failure = what + "; block " + text(b.x, b.y, b.z) +
        (running == nullptr ? "" : ", thread " + text(t.x, t.y, t.z));
  }
}

void make_ready(Thread& thread) {
  thread.state = State::Ready;
  ready.add(thread.rank);
}

// Runs in every fiber: the fiber's thread of each block.
void fiber_function() {
  for (;;) {
    Thread& self = *running;
    if (failure.empty()) {
      try {
        (*body)();
      } catch (const Undefined& caught) {
        fail(caught.message);
      } catch (const Abandoned&) {
      } catch (const std::exception& caught) {
        fail(std::string("an exception in device code: ") + caught.what());
      }
    }
    self.state = State::Ended;
    const auto index = unsigned(&self - threads.data());
    warps[index / kWarp].alive &= ~(1u << index % kWarp);
    --unfinished;
    self.fiber->suspend();
  }
}

void resume(Thread& thread) {
  running = &thread;
  built_in.thread = thread.index;
  if (counts_bytes) {
    const auto [begin, end] = thread.fiber->stack();
    traffic_watch = {&traffic, begin, end};
  }
  thread.fiber->resume();
  traffic_watch = {};
  running = nullptr;
}

void wait() {
  running->fiber->suspend();
  if (!failure.empty()) {
    throw Abandoned();
  }
}

// Describes why threads that have not ended cannot continue.
std::string describe_waiting() {
  std::map<std::string, int> places;
  for (unsigned i = 0; i < block_size; ++i) {
    const Thread& thread = threads[i];
    if (thread.state != State::Ended) {
      ++places[(thread.state == State::AtBarrier ? thread.barrier : thread.call.name) +
               (" at " + text(thread.call.where))];
    }
  }
  std::string result = "threads wait for others that never come";
  for (const auto& [place, count] : places) {
    result += ", " + std::to_string(count) + " in " + place;
  }
  return result;
}

void run_block() {
  shared_memory.begin_block(dynamic_bytes);
  traffic.begin_block();
  ready.clear();
  at_barrier = 0;
  unfinished = block_size;
  for (unsigned first = 0; first < block_size; first += kWarp) {
    warps[first / kWarp] = {block_size - first >= kWarp ? ~0u : (1u << (block_size - first)) - 1,
                            0};
  }
  const std::vector<uint32_t> sequence = order.threads(block_size);
  const dim3 size = built_in.block_dim;
  for (unsigned rank = 0; rank < block_size; ++rank) {
    const unsigned i = sequence[rank];
    Thread& thread = threads[i];
    if (!thread.fiber) {
      thread.fiber = std::make_unique<Fiber>(fiber_function);
    }
    thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    thread.rank = rank;
    make_ready(thread);
  }
  for (unsigned rank = ready.take(); rank < kMaxThreads && failure.empty(); rank = ready.take()) {
    resume(threads[sequence[rank]]);
  }
  if (failure.empty() && unfinished > 0) {
    fail(describe_waiting());
  }
  for (unsigned i = 0; i < block_size; ++i) { // after a failure: each throws Abandoned
    while (threads[i].state != State::Ended) {
      resume(threads[i]);
    }
  }
  const std::string overwritten = shared_memory.end_block();
  if (!overwritten.empty()) {
    fail(overwritten);
  }
}

} // namespace

void undefined(const Where& where, const std::string& what) {
  throw Undefined{what + " at " + text(where)};
}

int barrier(const char* name, bool predicate, const Where& where) {
  Thread& self = *running;
  if (unfinished < block_size) {
    undefined(where,
              std::string(name) + " after " + std::to_string(block_size - unfinished) +
                  " threads of the block have ended");
  }
  self.barrier = name;
  self.call.where = where;
  self.predicate = predicate;
  self.state = State::AtBarrier;
  if (++at_barrier == block_size) {
    at_barrier = 0;
    uint64_t count = 0;
    for (unsigned i = 0; i < block_size; ++i) {
      count += threads[i].predicate;
      if (!same(threads[i].call.where, where)) {
        undefined(where,
                  std::string(name) + " for some threads of the block, while others are in " +
                      threads[i].barrier + " at " + text(threads[i].call.where) + ", and");
      }
    }
    for (unsigned i = 0; i < block_size; ++i) {
      threads[i].result.word[0] = count;
      make_ready(threads[i]); // the last to arrive need not continue first
    }
  }
  wait();
  return int(self.result.word[0]);
}

Bits warp(WarpCall call, Combine combine) {
  Thread& self = *running;
  const unsigned index = unsigned(&self - threads.data()), first = index / kWarp * kWarp,
                 mask = call.mask;
  Warp& warp = warps[index / kWarp];
  Thread* lanes = &threads[first];
  call.lane = index - first;
  const auto lane_of_the_mask = [&](unsigned lane, const std::string& what) {
    undefined(
        call.where,
        std::string(call.name) + ": lane " + std::to_string(lane) + " of the mask " + what + ",");
  };
  if ((mask >> call.lane & 1) == 0) {
    undefined(call.where,
              std::string(call.name) + ": the mask leaves out its caller, lane " +
                  std::to_string(call.lane) + ",");
  }
  if (call.width < 1 || call.width > int(kWarp) || !std::has_single_bit(unsigned(call.width))) {
    undefined(call.where,
              std::string(call.name) + ": expected a power of two up to 32 as width, got " +
                  std::to_string(call.width) + ",");
  }
  if (const unsigned missing = mask & ~warp.alive; missing != 0) {
    const unsigned lane = unsigned(std::countr_zero(missing));
    lane_of_the_mask(lane,
                     first + lane < block_size ? "has ended" : "is beyond the end of the block");
  }
  self.call = call;
  self.state = State::InWarp;
  warp.waiting |= 1u << call.lane;
  bool all_here = (mask & ~warp.waiting) == 0;
  for (unsigned lanes_left = all_here ? mask : 0; lanes_left != 0; lanes_left &= lanes_left - 1) {
    const unsigned i = unsigned(std::countr_zero(lanes_left));
    const WarpCall& other = lanes[i].call;
    if (other.mask == mask && same(other.where, call.where)) {
      continue;
    }
    if ((other.mask >> call.lane & 1) != 0) {
      lane_of_the_mask(i,
                       std::string("is in ") + other.name + " at " + text(other.where) +
                           " with mask " + std::to_string(other.mask) + ", not " +
                           std::to_string(mask));
    }
    all_here = false; // that lane is in an earlier call for other lanes, and may still arrive
  }
  if (all_here) {
    Bits values[kWarp];
    for (unsigned lanes_left = mask; lanes_left != 0; lanes_left &= lanes_left - 1) {
      const unsigned i = unsigned(std::countr_zero(lanes_left));
      values[i] = lanes[i].call.value;
    }
    for (unsigned lanes_left = mask; lanes_left != 0; lanes_left &= lanes_left - 1) {
      Thread& lane = lanes[std::countr_zero(lanes_left)];
      lane.result = combine(lane.call, values);
      make_ready(lane);
    }
    warp.waiting &= ~mask;
  }
  wait();
  return self.result;
}

void* shared_variable(const void* key, const char* names, size_t size, size_t alignment) {
  void* memory = shared_memory.variable(key, names, size, alignment);
  const size_t bytes = shared_memory.bytes();
  if (bytes > most_bytes || bytes - dynamic_bytes > kMaxStaticShared) {
    throw Undefined{"the block has " + std::to_string(bytes) + " bytes of shared memory, " +
                    std::to_string(dynamic_bytes) + " of them dynamic, more than " +
                    std::to_string(bytes > most_bytes ? most_bytes : kMaxStaticShared)};
  }
  return memory;
}

bool allow_shared(const Where& where, std::string_view kernel, int bytes) {
  const std::lock_guard lock(machine);
  if (size_t(bytes) > kMaxShared) {
    return false;
  }
  size_t& most = most_dynamic[in_file(where, kernel)];
  TORCH_CHECK(size_t(bytes) >= most, kernel, " at ", text(where), ": a limit of ", bytes,
              " bytes of shared memory instead of ", most,
              ", on which a launch of another thread may depend");
  most = size_t(bytes);
  return true;
}

void count_launches(const char* name, int64_t launches) {
  const std::lock_guard lock(machine);
  counts[name].launches += launches;
}

bool is_capturing() { return capturing; }

void break_capture(const char* call) {
  const std::lock_guard lock(machine);
  if (capturing && broke_capture.empty()) {
    broke_capture = call;
  }
}

void* allocate_on_host(size_t bytes) {
  void* const data = std::malloc(bytes);
  host_allocations += data != nullptr;
  return data;
}

void free_on_host(void* data) {
  host_allocations -= data != nullptr;
  std::free(data);
}

bool is_shared(uintptr_t at) { return shared_memory.holds(at); }

void* dynamic_shared(const Where& where) {
  if (shared_memory.dynamic() == nullptr) {
    undefined(where, "dynamic shared memory, of which the launch has none,");
  }
  return shared_memory.dynamic();
}

void Launch::run(const std::function<void()>& thread) const {
  const std::lock_guard lock(machine);
  const auto count = uint64_t(block.x) * block.y * block.z;
  const auto allowed = most_dynamic.find(in_file(where, kernel));
  TORCH_CHECK(count > 0 && count <= kMaxThreads && block.x <= kMaxThreads &&
                  block.y <= kMaxThreads && block.z <= 64 && grid.x > 0 && grid.x <= 0x7FFFFFFFu &&
                  grid.y > 0 && grid.y <= 65535 && grid.z > 0 && grid.z <= 65535 &&
                  shared <= (allowed == most_dynamic.end() ? kMaxStaticShared : allowed->second),
              "CUDA error: invalid configuration argument: ", kernel, " at ", text(where),
              ", grid ", text(grid.x, grid.y, grid.z), ", block ", text(block.x, block.y, block.z),
              ", ", shared, " bytes of shared memory");
  dim3 blocks = grid;
  if (max_blocks > 0) {
    blocks.x = std::min(blocks.x, max_blocks);
  }
  const uint64_t total = uint64_t(blocks.x) * blocks.y * blocks.z;
  TORCH_CHECK(total <= kMaxBlocks, kernel, " at ", text(where), ": expected at most ", kMaxBlocks,
              " blocks to emulate, got ", total);
  body = &thread;
  block_size = unsigned(count);
  dynamic_bytes = shared;
  most_bytes = allowed == most_dynamic.end() ? kMaxStaticShared : kMaxShared;
  built_in.block_dim = block;
  built_in.grid_dim = blocks;
  failure.clear();
  if (counts_bytes) {
    traffic.begin_launch({{uintptr_t(threads.data()), uintptr_t(threads.data() + threads.size())}});
  }
  for (const uint32_t i : order.blocks(uint32_t(total))) {
    built_in.block = {i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y};
    run_block();
    if (!failure.empty()) {
      break;
    }
  }
  Counts& known = counts[kernel];
  known.launches += 1;
  known.blocks += int64_t(total);
  known.threads += int64_t(total * count);
  known.traffic += counts_bytes ? traffic.found() : Traffic();
  TORCH_CHECK(failure.empty(), "CUDA error: ", kernel, ", launched at ", text(where), ": ",
              failure);
}

namespace {

void set_order(const std::string& name) {
  const std::lock_guard lock(machine);
  order.set(name);
}

void set_max_blocks(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0 && count < (int64_t(1) << 31),
                    "XSOFTMAX_EMULATE_BLOCKS: expected 0 or more, got ", count);
  const std::lock_guard lock(machine);
  max_blocks = unsigned(count);
}

void count_bytes(bool count) {
  const std::lock_guard lock(machine);
  counts_bytes = count;
}

void set_capturing(bool begins) {
  const std::lock_guard lock(machine);
  capturing = begins;
  const std::string call = std::exchange(broke_capture, "");
  TORCH_CHECK(call.empty(), "CUDA error: ", call, " while a stream was capturing");
}

void forget() {
  const std::lock_guard lock(machine);
  counts.clear();
}

c10::Dict<std::string, c10::List<int64_t>> launched() {
  const std::lock_guard lock(machine);
  c10::Dict<std::string, c10::List<int64_t>> result;
  for (const auto& [name, known] : counts) {
    const auto& [requested, per_block, per_launch] = known.traffic;
    result.insert(name,
                  c10::List<int64_t>({known.launches, known.blocks, known.threads, requested.read,
                                      requested.written, per_block.read, per_block.written,
                                      per_launch.read, per_launch.written}));
  }
  return result;
}

TORCH_LIBRARY(cuda_emulator, m) {
  m.def("set_order(str order) -> ()", set_order);
  m.def("set_max_blocks(int count) -> ()", set_max_blocks);
  m.def("count_bytes(bool count) -> ()", count_bytes); // off by default, because it is slow
  m.def("set_capturing(bool begins) -> ()", set_capturing); // an error at the end if it was broken
  m.def("host_allocations() -> int", [] { return host_allocations.load(); });
  m.def("forget() -> ()", forget); // forgets earlier launches
  // Per kernel: launches, blocks, threads, and bytes read and written, three times: as requested,
  // per block, per launch (Traffic).
  m.def("launched() -> Dict(str, int[])", launched);
}

} // namespace
} // namespace emulator
