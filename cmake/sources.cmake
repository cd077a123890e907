# Every source of the library, by hand: a file that is not here is not built.
set(XSOFTMAX_SOURCES
  csrc/clusters/kmeans.cpp
  csrc/clusters/nearest.cpp
  csrc/core/anomalies.cpp
  csrc/core/block_product.cpp
  csrc/core/checks.cpp
  csrc/core/cpu_dispatch.cpp
  csrc/core/draft_folder.cpp
  csrc/core/impl.cpp
  csrc/core/init.cpp
  csrc/core/long_work.cpp
  csrc/core/mapped_file.cpp
  csrc/core/memory.cpp
  csrc/core/options.cpp
  csrc/core/philox.cpp
  csrc/core/products.cpp
  csrc/core/regular_file.cpp
  csrc/core/row_groups.cpp
  csrc/core/row_tables.cpp
  csrc/core/scale_gradient.cpp
  csrc/core/sorted_ids.cpp
  csrc/core/sparse_rows.cpp
  csrc/core/state_lock.cpp
  csrc/ids/id_table.cpp
  csrc/ids/id_table_cpu.cpp
  csrc/ids/id_table_module.cpp
  csrc/losses/block_gradients.cpp
  csrc/losses/cached_step.cpp
  csrc/losses/candidate_loss.cpp
  csrc/losses/candidate_loss_cpu.cpp
  csrc/losses/candidate_shares.cpp
  csrc/losses/candidates.cpp
  csrc/losses/cane_module.cpp
  csrc/losses/class_blocks.cpp
  csrc/losses/estimators.cpp
  csrc/losses/exclude_topk.cpp
  csrc/losses/hierarchical_matcher.cpp
  csrc/losses/hierarchical_matcher_init.cpp
  csrc/losses/hierarchical_matcher_module.cpp
  csrc/losses/linear_candidate_loss.cpp
  csrc/losses/linear_candidate_loss_cpu.cpp
  csrc/losses/linear_cross_entropy.cpp
  csrc/losses/linear_cross_entropy_cpu.cpp
  csrc/losses/linear_losses_module.cpp
  csrc/losses/linear_positives_loss.cpp
  csrc/losses/linear_softmax.cpp
  csrc/losses/linear_softmax_cpu.cpp
  csrc/losses/linear_topk.cpp
  csrc/losses/linear_topk_cpu.cpp
  csrc/losses/logit_transform.cpp
  csrc/losses/loss_shares.cpp
  csrc/losses/reduction.cpp
  csrc/losses/sampled_softmax_loss.cpp
  csrc/losses/beam_tree_step.cpp
  csrc/losses/sampled_step.cpp
  csrc/losses/table_loss_module.cpp
  csrc/losses/several_positives.cpp
  csrc/losses/soft_targets.cpp
  csrc/losses/tower_loss.cpp
  csrc/losses/tower_loss_cpu.cpp
  csrc/losses/tree_losses.cpp
  csrc/losses/tree_losses_module.cpp
  csrc/losses/two_tower_loss.cpp
  csrc/losses/two_tower_module.cpp
  csrc/matcher/canonical_rows.cpp
  csrc/matcher/linear_beam.cpp
  csrc/matcher/linear_layer.cpp
  csrc/matcher/linear_layer_input.cpp
  csrc/matcher/linear_layer_train.cpp
  csrc/matcher/read_examples.cpp
  csrc/matcher/shortlist.cpp
  csrc/matcher/sparse_row_sums.cpp
  csrc/matcher/xr_linear.cpp
  csrc/matcher/xr_linear_file.cpp
  csrc/optim/clip_grad.cpp
  csrc/optim/deferred_flushes.cpp
  csrc/optim/mapped_state.cpp
  csrc/optim/optimizers.cpp
  csrc/optim/owed_steps.cpp
  csrc/optim/reset_rows.cpp
  csrc/optim/resize_tables.cpp
  csrc/optim/row_adagrad.cpp
  csrc/optim/row_adagrad_cpu.cpp
  csrc/optim/row_adam.cpp
  csrc/optim/row_adam_cpu.cpp
  csrc/optim/row_norm.cpp
  csrc/optim/row_norm_cpu.cpp
  csrc/optim/row_sgd.cpp
  csrc/optim/row_sgd_cpu.cpp
  csrc/optim/row_states.cpp
  csrc/optim/row_step.cpp
  csrc/optim/row_update.cpp
  csrc/optim/settle.cpp
  csrc/optim/sparse_clipping.cpp
  csrc/retrieval/metrics.cpp
  csrc/retrieval/midx_search_index.cpp
  csrc/retrieval/search_index.cpp
  csrc/retrieval/search_index_class.cpp
  csrc/retrieval/search_topk.cpp
  csrc/retrieval/search_topk_cpu.cpp
  csrc/samplers/adaptive.cpp
  csrc/samplers/adaptive_kind.cpp
  csrc/samplers/adaptive_modules.cpp
  csrc/samplers/alias_sample.cpp
  csrc/samplers/alias_sample_cpu.cpp
  csrc/samplers/candidate_set.cpp
  csrc/samplers/cane_kind.cpp
  csrc/samplers/complement_kind.cpp
  csrc/samplers/complement_module.cpp
  csrc/samplers/complement_sample.cpp
  csrc/samplers/in_batch_kind.cpp
  csrc/samplers/in_batch_sample.cpp
  csrc/samplers/kernel_sample.cpp
  csrc/samplers/kernel_sample_cpu.cpp
  csrc/samplers/log_uniform_sample.cpp
  csrc/samplers/log_uniform_sample_cpu.cpp
  csrc/samplers/lsh_sample.cpp
  csrc/samplers/lsh_sample_cpu.cpp
  csrc/samplers/midx_codebook_loss.cpp
  csrc/samplers/midx_exact.cpp
  csrc/samplers/midx_index.cpp
  csrc/samplers/midx_index_cpu.cpp
  csrc/samplers/midx_module.cpp
  csrc/samplers/midx_refresh.cpp
  csrc/samplers/midx_sample.cpp
  csrc/samplers/midx_sample_cpu.cpp
  csrc/samplers/midx_study_module.cpp
  csrc/samplers/sampler.cpp
  csrc/samplers/sampler_kind.cpp
  csrc/samplers/sampling.cpp
  csrc/samplers/static_kind.cpp
  csrc/samplers/static_module.cpp
  csrc/samplers/static_sample.cpp
  csrc/samplers/static_tail.cpp
  csrc/samplers/streaming_counts.cpp
  csrc/samplers/streaming_counts_cpu.cpp
  csrc/samplers/systematic_sample.cpp
  csrc/samplers/systematic_sample_cpu.cpp
  csrc/samplers/table_log_prob.cpp
  csrc/samplers/uniform_sample.cpp
  csrc/samplers/uniform_sample_cpu.cpp
  csrc/samplers/union_kind.cpp
  csrc/samplers/union_merge.cpp
  csrc/samplers/union_module.cpp
  csrc/scores/candidate_scores.cpp
  csrc/scores/candidate_scores_cpu.cpp
  csrc/scores/gather_dot_cpu.cpp
  csrc/scores/ragged_scores.cpp
  csrc/scores/ragged_scores_cpu.cpp
  csrc/scores/row_gradient.cpp
  csrc/scores/row_terms.cpp
  csrc/scores/transform_names.cpp
  csrc/tables/mapped_table.cpp
  csrc/tables/tables_module.cpp
  csrc/trees/beam_search.cpp
  csrc/trees/beam_search_cpu.cpp
  csrc/trees/edge_tables.cpp
  csrc/trees/edge_tables_cpu.cpp
  csrc/trees/hierarchical_softmax.cpp
  csrc/trees/hierarchical_softmax_cpu.cpp
  csrc/trees/label_tree.cpp
  csrc/trees/label_tree_clusters.cpp
  csrc/trees/label_tree_module.cpp
  csrc/trees/label_tree_order.cpp
  csrc/trees/label_tree_vectors.cpp
  csrc/trees/tree_scores.cpp
  csrc/trees/tree_scores_cpu.cpp
  csrc/trees/xr_linear_train.cpp
  csrc/core/guards.cpp # last: it goes over the operators that the files above it have registered
)

# Compiled once for each instruction set (csrc/core/cpu_dispatch.h).
set(XSOFTMAX_SIMD_SOURCES
  csrc/clusters/nearest_rows.simd.cpp
  csrc/core/bf16_pack.simd.cpp
  csrc/losses/estimator_rows.simd.cpp
  csrc/losses/softmax_rows.simd.cpp
  csrc/matcher/linear_chunk.simd.cpp
  csrc/matcher/score_rows.simd.cpp
  csrc/matcher/sibling_solver.simd.cpp
  csrc/optim/row_updates.simd.cpp
  csrc/retrieval/cell_scan.simd.cpp
  csrc/samplers/midx_query_rows.simd.cpp
  csrc/scores/row_kernels.simd.cpp
)

# Built with XSOFTMAX_CUDA=ON.
set(XSOFTMAX_CUDA_SOURCES
  csrc/losses/candidate_loss_cuda.cu
  csrc/losses/linear_candidate_loss_cuda.cu
  csrc/losses/loss_shares_cuda.cu
  csrc/losses/linear_cross_entropy_cuda.cu
  csrc/losses/linear_topk_cuda.cu
  csrc/matcher/shortlist_cuda.cu
  csrc/optim/row_adagrad_cuda.cu
  csrc/optim/row_adam_cuda.cu
  csrc/optim/row_norm_cuda.cu
  csrc/optim/row_sgd_cuda.cu
  csrc/retrieval/search_topk_cuda.cu
  csrc/samplers/alias_sample_cuda.cu
  csrc/samplers/kernel_sample_cuda.cu
  csrc/samplers/log_uniform_sample_cuda.cu
  csrc/samplers/lsh_sample_cuda.cu
  csrc/samplers/midx_exact_cuda.cu
  csrc/samplers/midx_index_cuda.cu
  csrc/samplers/midx_sample_cuda.cu
  csrc/samplers/midx_sets_cuda.cu
  csrc/samplers/systematic_sample_cuda.cu
  csrc/samplers/sorted_set_cuda.cu
  csrc/samplers/static_sample_cuda.cu
  csrc/samplers/uniform_sample_cuda.cu
  csrc/scores/candidate_scores_cuda.cu
  csrc/scores/gather_dot_cuda.cu
  csrc/scores/ragged_scores_cuda.cu
  csrc/scores/row_gradient_cuda.cu
  csrc/scores/row_terms_cuda.cu
  csrc/trees/beam_search_cuda.cu
  csrc/trees/edge_tables_cuda.cu
  csrc/trees/hierarchical_softmax_cuda.cu
  csrc/trees/tree_scores_cuda.cu
)

# xsoftmax_split_sources(COMPILED OBJECTS FILE...): which FILEs are to be compiled, and objects of XSOFTMAX_CXX_OBJECTS that stand for the others.
# A CUDA build does not change C++ sources, so it takes all objects. Under sanitizers what touches memory itself is compiled; the others
# call operators of torch, which is not instrumented.
function(xsoftmax_split_sources compiled objects)
  set(to_compile "")
  set(to_link "")
  foreach(file IN LISTS ARGN)
    set(touches_memory "")
    if(XSOFTMAX_SANITIZE)
      set(pointers "data_ptr|accessor|memcpy|mmap|parallel_for|(float|double|int64_t|int32_t|scalar_t|uint8_t|Row|T)[*] ")
      file(STRINGS ${file} touches_memory REGEX "${pointers}" LIMIT_COUNT 1)
      if(file MATCHES "_cpu[.]cpp$")
        set(touches_memory ON)
      endif()
    endif()
    if(XSOFTMAX_CXX_OBJECTS AND touches_memory STREQUAL "")
      list(APPEND to_link ${XSOFTMAX_CXX_OBJECTS}/CMakeFiles/xsoftmax.dir/${file}.o)
    else()
      list(APPEND to_compile ${file})
    endif()
  endforeach()
  if(XSOFTMAX_CXX_OBJECTS AND NOT to_compile)
    file(GLOB simd ${XSOFTMAX_CXX_OBJECTS}/CMakeFiles/xsoftmax.dir/simd/*.o)
    list(APPEND to_link ${simd})
  endif()
  set(${compiled} ${to_compile} PARENT_SCOPE)
  set(${objects} ${to_link} PARENT_SCOPE)
endfunction()
