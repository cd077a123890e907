# Every source of the library, by hand: a file that is not here is not built.
set(XSOFTMAX_SOURCES
  csrc/core/checks.cpp
  csrc/core/cpu_dispatch.cpp
  csrc/core/impl.cpp
  csrc/core/init.cpp
  csrc/core/matmul.cpp
  csrc/core/philox.cpp
  csrc/core/row_groups.cpp
  csrc/losses/candidate_loss.cpp
  csrc/losses/candidate_loss_cpu.cpp
  csrc/losses/class_blocks.cpp
  csrc/losses/estimators.cpp
  csrc/losses/linear_cross_entropy.cpp
  csrc/losses/linear_cross_entropy_cpu.cpp
  csrc/losses/modules.cpp
  csrc/losses/sampled_softmax_loss.cpp
  csrc/optim/clip_grad.cpp
  csrc/optim/optimizers.cpp
  csrc/optim/row_adagrad.cpp
  csrc/optim/row_adagrad_cpu.cpp
  csrc/optim/row_adam.cpp
  csrc/optim/row_adam_cpu.cpp
  csrc/optim/row_norm.cpp
  csrc/optim/row_norm_cpu.cpp
  csrc/optim/row_sgd.cpp
  csrc/optim/row_sgd_cpu.cpp
  csrc/optim/row_update.cpp
  csrc/samplers/alias_sample.cpp
  csrc/samplers/alias_sample_cpu.cpp
  csrc/samplers/log_uniform_sample.cpp
  csrc/samplers/log_uniform_sample_cpu.cpp
  csrc/samplers/modules.cpp
  csrc/samplers/sampling.cpp
  csrc/samplers/systematic_sample.cpp
  csrc/samplers/systematic_sample_cpu.cpp
  csrc/samplers/uniform_sample.cpp
  csrc/samplers/uniform_sample_cpu.cpp
  csrc/scores/candidate_scores.cpp
  csrc/scores/candidate_scores_cpu.cpp
  csrc/scores/gather_dot_cpu.cpp
  csrc/scores/ragged_scores.cpp
  csrc/scores/ragged_scores_cpu.cpp
  csrc/scores/row_gradient.cpp
)

# Compiled once for each instruction set (csrc/core/cpu_dispatch.h).
set(XSOFTMAX_SIMD_SOURCES
  csrc/losses/estimator_rows.simd.cpp
  csrc/losses/softmax_rows.simd.cpp
  csrc/optim/row_updates.simd.cpp
  csrc/scores/row_kernels.simd.cpp
)

# Built with XSOFTMAX_CUDA=ON.
set(XSOFTMAX_CUDA_SOURCES
)
