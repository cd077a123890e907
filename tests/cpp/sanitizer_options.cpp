// What the sanitizers read when the test program starts, so that it runs the same under ctest, in a debugger and by hand.

extern "C" {

const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }

// Registries and thread pools that live as long as the process, of libraries that this project does not build.
const char* __lsan_default_suppressions() { return "leak:libtorch_cpu.so\nleak:libtorch.so\nleak:libc10.so\nleak:libgomp\n"; }

} // extern "C"
