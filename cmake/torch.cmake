# Finds torch with no more of a CUDA toolkit than this build uses.
#
# The CMake package of a CUDA build of torch asks for a whole toolkit (cuFFT, cuRAND, NVRTC, ...), fails where a part is missing, also
# for a build without CUDA kernels, and replaces CMAKE_CUDA_ARCHITECTURES by a list of its own. It leaves all that out when a target
# torch::cudart exists already: that target is the one thing its own targets link. So it is defined here: the CUDA runtime for a build
# with kernels, nothing for a build without.
if(NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
  if(XSOFTMAX_CUDA)
    set_property(TARGET torch::cudart PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart)
  endif()
endif()

find_package(Torch REQUIRED)

if(XSOFTMAX_CUDA AND NOT TARGET torch_cuda)
  message(FATAL_ERROR "XSOFTMAX_CUDA=ON needs a CUDA build of torch; the one in ${TORCH_INSTALL_PREFIX} is a CPU build")
endif()
