#pragma once

// Instruction sets are chosen when the library runs. A file `X.simd.cpp` is compiled once for each set, with XS_ISA naming
// the namespace and the set's compiler flags, and defines one constant table of function pointers in it. Such a file includes
// no ATen or C++ library template header: an inline function emitted with AVX-512 could otherwise be the copy that the linker
// keeps for everybody.

namespace xsoftmax {

enum class CpuIsa { Default = 0, Avx2 = 1, Avx512 = 2 };

/// The widest instruction set of this build that the CPU has, or the one that the environment variable
/// XSOFTMAX_CPU=default|avx2|avx512 names. Fixed at the first call. Throws if the variable names a set that is unknown, or that the
/// CPU lacks.
CpuIsa cpu_isa();

/// "default", "avx2" or "avx512".
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
