# Install rules and the CMake package: find_package(sparsemla) gives the target sparsemla::sparsemla.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sparsemla)
set_target_properties(sparsemla PROPERTIES VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})  # of a shared build; before 1.0 each minor may break

install(TARGETS sparsemla EXPORT sparsemla-targets)
if(SPARSEMLA_BUILD_CLI)
  install(TARGETS sparsemla_cli)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/sparsemla TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(EXPORT sparsemla-targets NAMESPACE sparsemla:: DESTINATION ${package_dir})

# A static library leaves the CUDA runtime to whoever links it.
set(find_cuda "")
get_target_property(library_type sparsemla TYPE)
if(SPARSEMLA_HAS_CUDA AND library_type STREQUAL "STATIC_LIBRARY")
  set(find_cuda "find_dependency(CUDAToolkit)")
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/sparsemla-config.cmake.in
  ${PROJECT_BINARY_DIR}/sparsemla-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sparsemla-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sparsemla-config.cmake ${PROJECT_BINARY_DIR}/sparsemla-config-version.cmake
  DESTINATION ${package_dir})
