# Adds the CUDA half to gluon_syncbn_objects, where it can be built; included by CMakeLists.txt.
# It reads GLUON_SYNCBN_CUDA, CMAKE_CUDA_ARCHITECTURES and GLUON_SYNCBN_CHECKS, and sets
# GLUON_SYNCBN_CUDA_ARCHITECTURES ("75-real;90-virtual"), empty in a build without CUDA.
set(GLUON_SYNCBN_CUDA_ARCHITECTURES "")
if(NOT DEFINED GLUON_SYNCBN_CUDA OR GLUON_SYNCBN_CUDA STREQUAL "")
  set(GLUON_SYNCBN_CUDA auto)
endif()
if(NOT GLUON_SYNCBN_CUDA)
  return()
endif()
# Sanitizers are about host code, and the native tests bring what stands in for CUDA.
if(GLUON_SYNCBN_SANITIZE OR GLUON_SYNCBN_BUILD_TESTS)
  return()
endif()

# Machine code for the generations that MXNet's wheels know and for Hopper, as far as this nvcc has
# them, and PTX of the newest, which drivers compile for anything later.
function(choose_architectures)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known
                  RESULT_VARIABLE status ERROR_QUIET)
  set(chosen "")
  foreach(architecture 50 60 70 75 80 86 90)
    if(NOT status EQUAL 0 OR known MATCHES "compute_${architecture}[^0-9]")
      list(APPEND chosen ${architecture}-real)
      set(newest ${architecture})
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES ${chosen} ${newest}-virtual PARENT_SCOPE)
endfunction()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(GLUON_SYNCBN_CUDA STREQUAL auto)
    message(STATUS "No working nvcc: gluon_syncbn is built without GPU support")
    return()
  endif()
  message(FATAL_ERROR "GLUON_SYNCBN_CUDA=${GLUON_SYNCBN_CUDA}, but there is no nvcc that works with "
                      "${CMAKE_CXX_COMPILER}; set CUDACXX to its path, or CUDAHOSTCXX to a host "
                      "compiler that it accepts")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  choose_architectures()
endif()
enable_language(CUDA)
set(GLUON_SYNCBN_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
find_package(CUDAToolkit REQUIRED)

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS kernels/cuda/*.cc kernels/cuda/*.cu op/cuda/*.cc)
target_sources(gluon_syncbn_objects PRIVATE ${CUDA_SOURCES} kernels/c_api_cuda.cc)
target_compile_definitions(gluon_syncbn_objects PUBLIC SYNCBN_CUDA)
string(REPLACE ";" " " architectures "${GLUON_SYNCBN_CUDA_ARCHITECTURES}")
set_source_files_properties(kernels/cuda/batch_norm_cuda.cc PROPERTIES COMPILE_DEFINITIONS
                            "SYNCBN_CUDA_ARCHITECTURES=\"${architectures}\"")
set_target_properties(gluon_syncbn_objects PROPERTIES
                      CUDA_ARCHITECTURES "${GLUON_SYNCBN_CUDA_ARCHITECTURES}" CUDA_STANDARD 17
                      CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden)
target_compile_options(gluon_syncbn_objects PRIVATE
                       "$<$<COMPILE_LANGUAGE:CUDA>:-Xfatbin=-compress-all>")
# Static: MXNet brings a CUDA runtime of its own version, and on a CPU there is none.
target_link_libraries(gluon_syncbn_objects PUBLIC CUDA::cudart_static)

# What scripts/check_gpu.sh runs without Python.
if(GLUON_SYNCBN_CHECKS)
  add_executable(test_cuda_kernels EXCLUDE_FROM_ALL ../tests/cpp/test_cuda_kernels.cc)
  add_executable(benchmark_gpu EXCLUDE_FROM_ALL ../scripts/benchmark_gpu.cc)
  target_include_directories(test_cuda_kernels PRIVATE ../tests/cpp)
  target_link_libraries(test_cuda_kernels PRIVATE gluon_syncbn_objects)
  target_link_libraries(benchmark_gpu PRIVATE gluon_syncbn_objects)
endif()
