# Lets torch be found with no more of a CUDA toolkit than is used. Include before find_package(Torch).
#
# The CMake package of a CUDA build of torch asks for a whole toolkit (cuFFT, cuRAND, NVRTC, ...), fails where a part is missing, also for a
# program without CUDA code, and replaces CMAKE_CUDA_ARCHITECTURES by a list of its own. It leaves all that out when a target torch::cudart
# exists already: that target is the one thing its own targets link. So it is defined here: the CUDA runtime where it has been found
# (find_package(CUDAToolkit)), nothing elsewhere.
if(NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
  if(TARGET CUDA::cudart)
    set_property(TARGET torch::cudart PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart)
  endif()
endif()
