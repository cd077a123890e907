# The sources of the library, by the ends of their names: *.simd.cpp is compiled once per
# instruction set (csrc/cpu/cpu_dispatch.h), *_cuda.cu only with XSOFTMAX_CUDA=ON. New files are
# found at the next build.
file(GLOB_RECURSE XSOFTMAX_SOURCES RELATIVE ${CMAKE_CURRENT_LIST_DIR}/.. CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../csrc/*.cpp)
set(XSOFTMAX_SIMD_SOURCES ${XSOFTMAX_SOURCES})
list(FILTER XSOFTMAX_SOURCES EXCLUDE REGEX "[.]simd[.]cpp$")
list(FILTER XSOFTMAX_SIMD_SOURCES INCLUDE REGEX "[.]simd[.]cpp$")
file(GLOB_RECURSE XSOFTMAX_CUDA_SOURCES RELATIVE ${CMAKE_CURRENT_LIST_DIR}/.. CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../csrc/*_cuda.cu)

# xsoftmax_split_sources(COMPILED OBJECTS FILE...): splits FILEs into those to compile and those
# replaced by objects of XSOFTMAX_CXX_OBJECTS. A CUDA build does not change C++ sources, so it takes
# all objects. With sanitizers, files that access memory directly are compiled; the others only call
# operators of torch, which is not instrumented.
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
