include(${CMAKE_CURRENT_LIST_DIR}/cudart.cmake)
find_package(Torch REQUIRED)

if(XSOFTMAX_CUDA AND NOT TARGET torch_cuda)
  message(FATAL_ERROR "XSOFTMAX_CUDA=ON needs a CUDA build of torch; the one in ${TORCH_INSTALL_PREFIX} is a CPU build")
endif()
