include(${CMAKE_CURRENT_LIST_DIR}/cudart.cmake)
find_package(Torch REQUIRED)

if(XSOFTMAX_CUDA AND NOT TARGET torch_cuda)
  message(FATAL_ERROR "XSOFTMAX_CUDA=ON needs a CUDA build of torch; the one in ${TORCH_INSTALL_PREFIX} is a CPU build")
endif()

# Compare the CUDA versions here, because cudart.cmake skips torch's own check. A LibTorch archive has
# no version.py.
if(XSOFTMAX_CUDA AND EXISTS ${TORCH_INSTALL_PREFIX}/version.py)
  file(STRINGS ${TORCH_INSTALL_PREFIX}/version.py version REGEX "^cuda[ :].*= '")
  string(REGEX MATCH "[0-9]+[.][0-9]+" torch_cuda "${version}")
  if(torch_cuda AND NOT torch_cuda MATCHES "^${XSOFTMAX_CUDA_MAJOR}[.]")
    message(FATAL_ERROR "XSOFTMAX_CUDA=ON with ${CMAKE_CUDA_COMPILER} needs a build of torch for CUDA ${XSOFTMAX_CUDA_MAJOR}; the one in ${TORCH_INSTALL_PREFIX} is for CUDA ${torch_cuda}")
  endif()
endif()
