include(CheckCXXSourceCompiles)

# xsoftmax_use_old_symbols(TARGET): limits the system symbols that the library needs to those of
# torch's own wheels, manylinux_2_28 (glibc 2.28 and the libstdc++ of GCC 8). A build on a newer
# system would bind to the newest version of each function. This binds to the version of the old
# system or, if that has none, to a replacement in cmake/old_symbols.cpp. On the old system itself
# it does nothing.
function(xsoftmax_use_old_symbols target)
  check_cxx_source_compiles("#include <features.h>\n#if !__GLIBC_PREREQ(2, 29)\n#error\n#endif\nint main() {}" XSOFTMAX_GLIBC_IS_NEW)
  if(NOT XSOFTMAX_GLIBC_IS_NEW)
    return()
  endif()
  target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/old_symbols.cpp)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/cmake/old_symbols.cpp PROPERTIES
    SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS -fvisibility=hidden)
  foreach(name exp exp2 log log2 pow pthread_mutex_trylock pthread_rwlock_rdlock pthread_rwlock_wrlock pthread_rwlock_unlock stat lstat fstat
      _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE _ZSt8to_charsPcS_d _ZSt10from_charsPKcS0_RdSt12chars_format
      _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv)
    target_link_options(${target} PRIVATE "-Wl,--wrap=${name}")
  endforeach()
endfunction()
