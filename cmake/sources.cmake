# The sources of the library, by the ends of their names: *.simd.cpp is compiled once per
# instruction set (csrc/cpu/cpu_dispatch.h), *_cuda.cu only with XSOFTMAX_CUDA=ON. New files are
# found at the next build.
file(GLOB_RECURSE XSOFTMAX_SOURCES RELATIVE ${CMAKE_CURRENT_LIST_DIR}/.. CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../csrc/*.cpp)
set(XSOFTMAX_SIMD_SOURCES ${XSOFTMAX_SOURCES})
list(FILTER XSOFTMAX_SOURCES EXCLUDE REGEX "[.]simd[.]cpp$")
list(FILTER XSOFTMAX_SIMD_SOURCES INCLUDE REGEX "[.]simd[.]cpp$")
file(GLOB_RECURSE XSOFTMAX_CUDA_SOURCES RELATIVE ${CMAKE_CURRENT_LIST_DIR}/.. CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../csrc/*_cuda.cu)

set(XSOFTMAX_BATCH 5 CACHE STRING "Files compiled as one; 1: each by itself, for work on them")

# xsoftmax_batch_sources(BATCHES SUFFIX FILE...): writes a file with this SUFFIX for each
# XSOFTMAX_BATCH FILEs of a folder that includes them. Torch's headers and their templates are then
# read once for all of them, which takes two fifths off the time of a build. Names at file scope must
# differ within a folder. BATCHES are these files, and for each of them batch_NAME is the list of its
# FILEs.
function(xsoftmax_batch_sources batches suffix)
  set(written "")
  set(folders "")
  foreach(file IN LISTS ARGN)
    get_filename_component(folder ${file} DIRECTORY)
    list(APPEND folders ${folder})
    list(APPEND files_of_${folder} ${file})
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    string(REGEX REPLACE "^csrc/" "" name ${folder})
    string(REPLACE "/" "_" name ${name})
    set(number 0)
    while(files_of_${folder})
      list(SUBLIST files_of_${folder} 0 ${XSOFTMAX_BATCH} files)
      list(REMOVE_ITEM files_of_${folder} ${files})
      list(TRANSFORM files REPLACE "^csrc/(.+)" "#include \"\\1\"\n" OUTPUT_VARIABLE includes)
      string(REPLACE ";" "" includes "${includes}")
      file(CONFIGURE OUTPUT batches/${name}_${number}${suffix} CONTENT "${includes}" @ONLY)
      list(APPEND written batches/${name}_${number}${suffix})
      set(batch_${name}_${number} ${files} PARENT_SCOPE)
      math(EXPR number "${number} + 1")
    endwhile()
  endforeach()
  set(${batches} ${written} PARENT_SCOPE)
endfunction()

# xsoftmax_split_sources(COMPILED OBJECTS FILE...): splits FILEs into those to compile, in batches,
# and objects of XSOFTMAX_CXX_OBJECTS. A CUDA build does not change C++ sources, so it takes all
# objects. With sanitizers, batches that access memory directly are compiled; the others only call
# operators of torch, which is not instrumented.
function(xsoftmax_split_sources compiled objects)
  set(to_compile "")
  set(to_link "")
  xsoftmax_batch_sources(batches .cpp ${ARGN})
  foreach(batch IN LISTS batches)
    get_filename_component(name ${batch} NAME_WE)
    set(touches_memory "")
    if(XSOFTMAX_SANITIZE)
      set(pointers "data_ptr|accessor|memcpy|mmap|parallel_for|(float|double|int64_t|int32_t|scalar_t|uint8_t|Row|T)[*] ")
      foreach(file IN LISTS batch_${name})
        file(STRINGS ${file} lines REGEX "${pointers}" LIMIT_COUNT 1)
        if(lines OR file MATCHES "_cpu[.]cpp$")
          set(touches_memory ON)
        endif()
      endforeach()
    endif()
    if(XSOFTMAX_CXX_OBJECTS AND NOT touches_memory)
      list(APPEND to_link ${XSOFTMAX_CXX_OBJECTS}/CMakeFiles/xsoftmax.dir/${batch}.o)
    else()
      list(APPEND to_compile ${PROJECT_BINARY_DIR}/${batch})
    endif()
  endforeach()
  if(XSOFTMAX_CXX_OBJECTS AND NOT to_compile)
    file(GLOB simd ${XSOFTMAX_CXX_OBJECTS}/CMakeFiles/xsoftmax.dir/simd/*.o)
    list(APPEND to_link ${simd})
  endif()
  set(${compiled} ${to_compile} PARENT_SCOPE)
  set(${objects} ${to_link} PARENT_SCOPE)
endfunction()
