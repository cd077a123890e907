# xsoftmax_add_simd_sources(TARGET FILE...): compiles each FILE once per instruction set, each time
# in a separate namespace.
function(xsoftmax_add_simd_sources target)
  set(isas default)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND isas avx2 avx512)
    target_compile_definitions(${target} PRIVATE XS_X86)
  endif()
  # Sums are vectorised only where `#pragma omp simd reduction` allows another order, because the
  # range reduction of exp must be computed as written. Infinities and NaN keep their meaning.
  set(common -O3 -fopenmp-simd -fno-trapping-math -fno-math-errno -ffp-contract=fast
    -Wno-psabi) # vectors wider than a register are not passed between files
  set(flags_default "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  foreach(file IN LISTS ARGN)
    foreach(isa IN LISTS isas)
      get_filename_component(stem ${file} NAME_WE)
      set(XS_SIMD_SOURCE ${PROJECT_SOURCE_DIR}/${file})
      set(XS_SIMD_ISA isa_${isa})
      set(copy ${PROJECT_BINARY_DIR}/simd/${stem}_${isa}.cpp)
      configure_file(${PROJECT_SOURCE_DIR}/cmake/simd.cpp.in ${copy} @ONLY)
      set_source_files_properties(${copy} PROPERTIES
        COMPILE_OPTIONS "${common};${flags_${isa}}" SKIP_PRECOMPILE_HEADERS ON)
      target_sources(${target} PRIVATE ${copy})
    endforeach()
  endforeach()
endfunction()
