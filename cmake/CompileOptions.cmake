# One interface target that every target of the project links privately: warnings, architecture, sanitizers.
find_package(Threads REQUIRED)

add_library(sparsemla_options INTERFACE)
target_compile_options(sparsemla_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror=empty-body -Werror=return-type
  # Neither changes a value; both let loops over math functions vectorise. -ffp-contract=off keeps a*b+c as two roundings
  # unless the source says fma, so that results do not depend on what the compiler happens to fuse.
  -fno-math-errno -fno-trapping-math -ffp-contract=off)
# GCC 12 reports its own AVX-512 headers and fmt 9 as soon as they are inlined here.
target_compile_options(sparsemla_options INTERFACE
  $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-stringop-overflow>)
# GCC 12.2 with AVX-512 stores some 32-byte constants wrongly (equal words, then zeros: {.25, .25, .25, 0} came out as four
# times .25). Moves and stores of at most 16 bytes for constants and copies avoid it; vectorised loops are not touched.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(sparsemla_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mmove-max=128;-mstore-max=128>)
endif()
if(SPARSEMLA_CPU_ARCH)
  target_compile_options(sparsemla_options INTERFACE -march=${SPARSEMLA_CPU_ARCH})
endif()
if(SPARSEMLA_SANITIZE)
  target_compile_options(sparsemla_options INTERFACE
    -fsanitize=${SPARSEMLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(sparsemla_options INTERFACE -fsanitize=${SPARSEMLA_SANITIZE})
endif()
