#pragma once

// Runtime selection of the CPU instruction set. A file `X.simd.cpp` is compiled once per
// instruction set, with that set's compiler flags and with XS_ISA as the name of its namespace, in
// which it defines one constant table of function pointers. Such a file must not include ATen or
// C++ library template headers: the linker could otherwise keep an inline function compiled with
// AVX-512 as the only copy in the library.

namespace xsoftmax {

enum class CpuIsa { Default = 0, Avx2 = 1, Avx512 = 2 };

/// Returns the instruction set named by the environment variable XSOFTMAX_CPU=default|avx2|avx512
/// or, if unset, the widest one of this build that the CPU supports. Fixed at the first call.
/// Throws if the variable names a set that is unknown or that the CPU does not support.
CpuIsa cpu_isa();

/// Returns "default", "avx2" or "avx512".
const char* cpu_isa_name(CpuIsa isa);

} // namespace xsoftmax

#ifdef XS_X86
#define XS_DECLARE_ISA_TABLE(Table, name)            \
  namespace isa_default { extern const Table name; } \
  namespace isa_avx2 { extern const Table name; }    \
  namespace isa_avx512 { extern const Table name; }  \
  inline const Table& name() {                       \
    switch (cpu_isa()) {                             \
      case CpuIsa::Avx512: return isa_avx512::name;  \
      case CpuIsa::Avx2: return isa_avx2::name;      \
      default: return isa_default::name;             \
    }                                                \
  }
#else
#define XS_DECLARE_ISA_TABLE(Table, name)            \
  namespace isa_default { extern const Table name; } \
  inline const Table& name() { return isa_default::name; }
#endif
