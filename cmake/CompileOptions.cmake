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
# GCC 12.2 with AVX-512 miscompiles straight-line code here: with its SLP vectoriser the constants {.25, .25, .25, 0} of a
# test came out as four times .25. Loops are vectorised by another pass, so nothing is lost.
target_compile_options(sparsemla_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-tree-slp-vectorize>)
if(SPARSEMLA_CPU_ARCH)
  target_compile_options(sparsemla_options INTERFACE -march=${SPARSEMLA_CPU_ARCH})
endif()
if(SPARSEMLA_SANITIZE)
  target_compile_options(sparsemla_options INTERFACE
    -fsanitize=${SPARSEMLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(sparsemla_options INTERFACE -fsanitize=${SPARSEMLA_SANITIZE})
endif()
