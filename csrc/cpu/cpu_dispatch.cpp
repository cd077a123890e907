#include "cpu/cpu_dispatch.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string_view>

namespace xsoftmax {
namespace {

CpuIsa widest_isa() {
#ifdef XS_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return CpuIsa::Avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return CpuIsa::Avx2;
  }
#endif
  return CpuIsa::Default;
}

CpuIsa choose_isa() {
  const CpuIsa widest = widest_isa();
  const char* wanted = std::getenv("XSOFTMAX_CPU");
  if (wanted == nullptr || *wanted == '\0') {
    return widest;
  }
  for (const CpuIsa isa : {CpuIsa::Default, CpuIsa::Avx2, CpuIsa::Avx512}) {
    if (std::string_view(wanted) == cpu_isa_name(isa)) {
      TORCH_CHECK(isa <= widest,
                  "XSOFTMAX_CPU: expected an instruction set that this CPU has (at most ",
                  cpu_isa_name(widest), "), got ", wanted);
      return isa;
    }
  }
  TORCH_CHECK(false, "XSOFTMAX_CPU: expected default, avx2 or avx512, got ", wanted);
}

} // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose_isa();
  return isa;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::Avx512: return "avx512";
    case CpuIsa::Avx2: return "avx2";
    default: return "default";
  }
}

} // namespace xsoftmax
