// Default options for the sanitizers, so that the test program runs the same way under ctest, in a
// debugger and by hand.

extern "C" {

const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }

// Registries and thread pools of third-party libraries that live as long as the process.
const char* __lsan_default_suppressions() {
  return "leak:libtorch_cpu.so\nleak:libtorch.so\nleak:libc10.so\nleak:libgomp\n";
}

} // extern "C"
