# One interface target that every target of the project links privately: warnings, architecture, sanitizers.
find_package(Threads REQUIRED)

add_library(sparsemla_options INTERFACE)
# For the compiler itself; nvcc's turn comes at the end.
function(sparsemla_host_options)
  target_compile_options(sparsemla_options INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:${ARGN}>")
endfunction()

sparsemla_host_options(
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror=empty-body -Werror=return-type
  # Neither changes a value; both let loops over math functions vectorise. -ffp-contract=off keeps a*b+c as two roundings
  # unless the source says fma, so that results do not depend on what the compiler happens to fuse.
  -fno-math-errno -fno-trapping-math -ffp-contract=off)
# GCC 12 reports its own AVX-512 headers and fmt 9 as soon as they are inlined here.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  sparsemla_host_options(-Wno-maybe-uninitialized -Wno-stringop-overflow)
endif()
# GCC 12.2 with AVX-512 stores some 32-byte constants wrongly (equal words, then zeros: {.25, .25, .25, 0} came out as four
# times .25). Moves and stores of at most 16 bytes for constants and copies avoid it; vectorised loops are not touched.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(sparsemla_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mmove-max=128;-mstore-max=128>)
endif()
if(SPARSEMLA_CPU_ARCH)
  sparsemla_host_options(-march=${SPARSEMLA_CPU_ARCH})
endif()
if(SPARSEMLA_SANITIZE)
  sparsemla_host_options(-fsanitize=${SPARSEMLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(sparsemla_options INTERFACE -fsanitize=${SPARSEMLA_SANITIZE})
endif()
if(SPARSEMLA_WERROR)
  sparsemla_host_options(-Werror)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # gcc 12 sees overlapping copies inside std::string's operator+ that are not there.
    sparsemla_host_options(-Wno-error=restrict)
  endif()
endif()
# Host code in CUDA files is for launching: no -march, and no warnings that nvcc's own generated code would raise.
if(SPARSEMLA_HAS_CUDA)
  set(device_options --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra)
  if(SPARSEMLA_WERROR)
    list(APPEND device_options -Werror=all-warnings)
  endif()
  target_compile_options(sparsemla_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${device_options}>")
endif()
