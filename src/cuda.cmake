# Adds the CUDA files to gluon_syncbn_objects if they can be built. Sets the variables `architectures`
# (for example "75-real 90-virtual") and GLUON_SYNCBN_CUDA_ARCHITECTURES (with semicolons).
# Otherwise sets GLUON_SYNCBN_CUDA_MISSING to the reason. GLUON_SYNCBN_CUDA=1 needs a working nvcc.
set(GLUON_SYNCBN_CUDA_ARCHITECTURES "")
set(GLUON_SYNCBN_CUDA_MISSING "")
if(NOT DEFINED GLUON_SYNCBN_CUDA OR GLUON_SYNCBN_CUDA STREQUAL "")
  set(GLUON_SYNCBN_CUDA auto)
endif()
# Native tests, also with sanitizers, emulate CUDA.
if(GLUON_SYNCBN_SANITIZE OR GLUON_SYNCBN_BUILD_TESTS)
  set(GLUON_SYNCBN_CUDA_MISSING "it was built for native tests")
  return()
endif()
if(NOT GLUON_SYNCBN_CUDA)
  set(GLUON_SYNCBN_CUDA_MISSING "GLUON_SYNCBN_CUDA=${GLUON_SYNCBN_CUDA} was set")
  return()
endif()

# Lists CMAKE_CUDA_COMPILER or CUDACXX if one of them is set, else every nvcc in PATH and the usual
# folders.
function(list_nvccs result)
  set(found ${CMAKE_CUDA_COMPILER})
  if(NOT found)
    set(found $ENV{CUDACXX})
  endif()
  if(found)
    set(${result} ${found} PARENT_SCOPE)
    return()
  endif()
  string(REPLACE ":" ";" folders "$ENV{PATH}")
  file(GLOB installed /usr/local/cuda*/bin)
  list(SORT installed COMPARE NATURAL ORDER DESCENDING)
  # Packages of the Python environments on PATH.
  list(TRANSFORM folders APPEND "/../lib/python3*/site-packages/nvidia/cu*/bin"
       OUTPUT_VARIABLE wheels)
  file(GLOB wheels ${wheels})
  set(seen "")
  list(APPEND folders ${installed} ${wheels}
       /opt/cuda/bin /usr/bin /usr/lib/nvidia-cuda-toolkit/bin)
  foreach(folder ${folders})
    get_filename_component(file ${folder}/nvcc REALPATH)
    if(EXISTS ${file} AND NOT IS_DIRECTORY ${file} AND NOT file IN_LIST seen)
      list(APPEND seen ${file})
      list(APPEND found ${folder}/nvcc)
    endif()
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Sets `result` to the first nvcc that compiles and links a kernel, or to "", and `reason` to the
# errors of the others that were tried.
function(find_nvcc result reason)
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/probe)
  file(WRITE ${probe}.cu "__global__ void Nothing() {}\n"
                         "int main() { Nothing<<<1, 1>>>(); return cudaDeviceSynchronize(); }\n")
  set(host ${CMAKE_CUDA_HOST_COMPILER})
  if(NOT host)
    set(host $ENV{CUDAHOSTCXX})
  endif()
  if(host)
    set(host -ccbin ${host})
  endif()
  list_nvccs(nvccs)
  set(failures "")
  set(lines "")
  foreach(nvcc ${nvccs})
    get_filename_component(folder ${nvcc} DIRECTORY)
    execute_process(COMMAND ${nvcc} -std=c++17 ${host} -cudart static -L${folder}/../lib
                            ${probe}.cu -o ${probe}
                    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(status EQUAL 0)
      set(${result} ${nvcc} PARENT_SCOPE)
      set(${reason} ${failures} PARENT_SCOPE)
      return()
    endif()
    string(REGEX MATCH "[^\n]*(error|fatal|rror:)[^\n]*" line "${output}")
    if(NOT line)
      string(STRIP "${status} ${output}" line)
    endif()
    string(REGEX REPLACE "[^A-Za-z0-9.,:()=_+'/!#-]+" " " line "${line}")  # allowed in a C string
    # A host compiler that is too new. The rest is an option with which nvcc may fail later.
    string(REGEX REPLACE " The nvcc flag '-allow-unsupported-compiler'.*" "" line "${line}")
    if(NOT line IN_LIST lines)  # nvcc may be a script that runs another one
      list(APPEND lines "${line}")
      list(APPEND failures "${nvcc} does not work: ${line}")
    endif()
  endforeach()
  if(NOT nvccs)
    set(failures "there is no nvcc on PATH, in /usr/local/cuda*/bin or in another usual folder")
  endif()
  set(${result} "" PARENT_SCOPE)
  set(${reason} ${failures} PARENT_SCOPE)
endfunction()

find_nvcc(nvcc failures)
foreach(failure ${failures})
  message(STATUS "gluon_syncbn: ${failure}")
endforeach()
if(NOT nvcc)
  list(JOIN failures ", and " GLUON_SYNCBN_CUDA_MISSING)
  if(GLUON_SYNCBN_CUDA STREQUAL auto)
    return()
  endif()
  message(FATAL_ERROR "GLUON_SYNCBN_CUDA=${GLUON_SYNCBN_CUDA}, but there is no nvcc that works: "
                      "${GLUON_SYNCBN_CUDA_MISSING}; set CUDACXX to the path of one, or "
                      "CUDAHOSTCXX to a host compiler that it accepts, such as g++-11")
endif()
set(CMAKE_CUDA_COMPILER ${nvcc})
# NVIDIA's Python packages have the libraries in lib, but nvcc searches lib64.
get_filename_component(nvcc_folder ${nvcc} DIRECTORY)
string(APPEND CMAKE_CUDA_FLAGS " -L${nvcc_folder}/../lib")
execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
# Machine code for each major generation of GPUs from Maxwell to Hopper that this nvcc supports, and
# PTX of the newest generation, which drivers compile for later GPUs.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "")
  foreach(generation "50" "60" "70;75" "80" "90")
    foreach(architecture ${generation})
      if(known MATCHES "compute_${architecture}[^0-9]")
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
        set(newest ${architecture})
        break()
      endif()
    endforeach()
  endforeach()
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual)
endif()
# CMake's own error for an unknown architecture has forty lines, and does not list the known ones.
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES} $ENV{CUDAARCHS})
  string(REGEX MATCH "^[0-9]+" number ${architecture})
  if(number AND NOT known MATCHES "compute_${number}[^0-9]")
    string(REGEX MATCHALL "[0-9]+" numbers "${known}")
    list(JOIN numbers ", " numbers)
    message(FATAL_ERROR "CUDAARCHS or CMAKE_CUDA_ARCHITECTURES must be among ${numbers}, which "
                        "${nvcc} builds, got ${architecture}")
  endif()
endforeach()
enable_language(CUDA)
set(GLUON_SYNCBN_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS kernels/cuda/*.cu op/cuda/*.cc)
target_sources(gluon_syncbn_objects PRIVATE ${CUDA_SOURCES})
target_compile_definitions(gluon_syncbn_objects PUBLIC SYNCBN_CUDA)
list(JOIN GLUON_SYNCBN_CUDA_ARCHITECTURES " " architectures)
set_target_properties(gluon_syncbn_objects PROPERTIES
                      CUDA_ARCHITECTURES "${GLUON_SYNCBN_CUDA_ARCHITECTURES}" CUDA_STANDARD 17
                      CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden)
target_compile_options(gluon_syncbn_objects PRIVATE
                       "$<$<COMPILE_LANGUAGE:CUDA>:-Xfatbin=-compress-all>")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 11.2)
  # Compile two architectures of a file in parallel, because there are few files and they take long.
  target_compile_options(gluon_syncbn_objects PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--threads=2>")
endif()
# Headers and libraries must be nvcc's own; find_package(CUDAToolkit) may find another toolkit in
# /usr. CMake links the static runtime by default. We need it, because MXNet has another version.
target_include_directories(gluon_syncbn_objects SYSTEM PUBLIC
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
