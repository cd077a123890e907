# Every source of the library, by hand: a file that is not here is not built.
set(XSOFTMAX_SOURCES
  csrc/core/checks.cpp
  csrc/core/cpu_dispatch.cpp
  csrc/core/impl.cpp
  csrc/core/matmul.cpp
  csrc/core/row_groups.cpp
  csrc/losses/class_blocks.cpp
  csrc/losses/linear_cross_entropy.cpp
  csrc/losses/linear_cross_entropy_cpu.cpp
  csrc/losses/linear_topk.cpp
  csrc/losses/linear_topk_cpu.cpp
  csrc/scores/candidate_scores.cpp
  csrc/scores/candidate_scores_cpu.cpp
  csrc/scores/gather_dot_cpu.cpp
  csrc/scores/row_gradient.cpp
)

# Compiled once for each instruction set (csrc/core/cpu_dispatch.h).
set(XSOFTMAX_SIMD_SOURCES
  csrc/losses/softmax_rows.simd.cpp
  csrc/scores/row_kernels.simd.cpp
)

# Built with XSOFTMAX_CUDA=ON.
set(XSOFTMAX_CUDA_SOURCES
)
