// Compiled without sanitizers: the code that switches stacks tells AddressSanitizer about it
// explicitly.

#include "fiber.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" {
// Defined if the process runs with AddressSanitizer.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                          size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                           size_t* size);
void emulator_switch(void** save, void* to);
}

// Most of the cost of a warp intrinsic here is the switch. swapcontext asks the kernel for the
// signal mask each time, which takes ten times as long as storing the callee-saved registers.
#ifdef __x86_64__
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");
#else
void emulator_switch(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
#endif

namespace emulator {
namespace {

constexpr size_t kPage = 4096, kStack = 256 * 1024;
Fiber* entering = nullptr;

void before_switch(void** fake_stack, const void* bottom, size_t size) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(fake_stack, bottom, size);
  }
}
void after_switch(void* fake_stack, const void** bottom, size_t* size) {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack, bottom, size);
  }
}

} // namespace

Fiber::Fiber(void (*function)()) : function_(function) {
  // An inaccessible page ends the stack. Memory is allocated when it is first used.
  void* memory = mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) {
    throw std::bad_alloc();
  }
  stack_ = static_cast<unsigned char*>(memory) + kPage;
#ifdef __x86_64__
  // The stack contents that emulator_switch expects: six registers and the return address, aligned
  // as after a call. Stacks begin at different offsets in their pages; otherwise they would all
  // compete for the same cache lines.
  constexpr int kRegisters = 6;
  static unsigned made = 0;
  void** top = reinterpret_cast<void**>(stack_ + kStack - made++ % 16 * 192) - (kRegisters + 2);
  std::memset(top, 0, (kRegisters + 2) * sizeof(void*));
  top[kRegisters] = reinterpret_cast<void*>(&Fiber::enter);
  resume_point_ = top;
#else
  static_assert(sizeof(ucontext_t) < kStack / 2);
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack_;
  context->uc_stack.ss_size = kStack;
  makecontext(context, &Fiber::enter, 0);
  resume_point_ = context;
#endif
}

void Fiber::enter() {
  Fiber* self = entering;
  after_switch(nullptr, &self->driver_stack_, &self->driver_stack_size_);
  self->function_();
  __builtin_unreachable();
}

std::pair<uintptr_t, uintptr_t> Fiber::stack() const {
  return {uintptr_t(stack_), uintptr_t(stack_) + kStack};
}

void Fiber::resume() {
  entering = this;
  void* fake_stack = nullptr;
  before_switch(&fake_stack, stack_, kStack);
  emulator_switch(&driver_, resume_point_);
  after_switch(fake_stack, nullptr, nullptr);
}

void Fiber::suspend() {
  before_switch(&fake_stack_, driver_stack_, driver_stack_size_);
  emulator_switch(&resume_point_, driver_);
  after_switch(fake_stack_, &driver_stack_, &driver_stack_size_);
}

} // namespace emulator
