# Finds torch without parts of the CUDA toolkit that are not used. Include before
# find_package(Torch).
#
# The CMake package of a CUDA build of torch requires the whole toolkit (cuFFT, cuRAND, NVRTC, ...).
# It fails if a part is missing, even for a program without CUDA code, and overwrites
# CMAKE_CUDA_ARCHITECTURES. It skips all that if a target torch::cudart already exists, the only one
# that its own targets link. So define it here: the CUDA runtime if find_package(CUDAToolkit) found
# it, otherwise an empty target.
if(NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
  if(TARGET CUDA::cudart)
    set_property(TARGET torch::cudart PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart)
  endif()
endif()
