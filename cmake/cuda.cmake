# The CUDA compiler and runtime. Include before cmake/torch.cmake.
#
# Needs nvcc (PATH, CUDACXX or -DCMAKE_CUDA_COMPILER) with its headers and libcudart, and no other
# part of the toolkit: kernels use c10's CUDA headers and leave matrix products and sorting to ATen.
# CMAKE_CUDA_ARCHITECTURES selects the devices; one architecture builds several times faster than
# all. The default, which releases use, has the code of the first device of each generation, which
# later ones of the generation run too (8.0: 8.6 and 8.9), and PTX for generations to come.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90-real 100-real 120)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# Torch links the shared runtime. A static copy would be a second runtime in the process.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "XSOFTMAX_CUDA=ON needs CUDA 13, found ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
string(REGEX MATCH "^[0-9]+" XSOFTMAX_CUDA_MAJOR "${CMAKE_CUDA_COMPILER_VERSION}")

# xsoftmax_add_cuda_sources(TARGET FILE...): compiles FILEs for all of CMAKE_CUDA_ARCHITECTURES.
function(xsoftmax_add_cuda_sources target)
  xsoftmax_batch_sources(batches .cu ${ARGN})
  list(TRANSFORM batches PREPEND ${PROJECT_BINARY_DIR}/)
  target_sources(${target} PRIVATE ${batches})
  # Compressed for size, kernels take a sixth of the space, and nvcc a tenth more time.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --expt-extended-lambda -Xcompiler=-Wall
    --compress-mode=size>)
  target_link_libraries(${target} PRIVATE c10_cuda)
endfunction()
