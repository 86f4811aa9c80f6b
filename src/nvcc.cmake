# Finds an nvcc that works; included by cuda.cmake.

# Lists CMAKE_CUDA_COMPILER or CUDACXX if one of them is set, else every nvcc of this machine,
# beginning with PATH.
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
  # The packages of the Python environments on PATH.
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
    # Report the first line with an error, or `status` if nvcc could not be started.
    string(REGEX MATCH "[^\n]*(error|fatal|rror:)[^\n]*" line "${output}")
    if(NOT line)
      string(STRIP "${status} ${output}" line)
    endif()
    string(REGEX REPLACE "[^A-Za-z0-9.,:()=_+'/!#-]+" " " line "${line}")  # allowed in a C string
    list(APPEND failures "${nvcc} does not work: ${line}")
  endforeach()
  if(NOT nvccs)
    set(failures "there is no nvcc on PATH, in /usr/local/cuda*/bin or in Debian's place for it")
  endif()
  set(${result} "" PARENT_SCOPE)
  set(${reason} ${failures} PARENT_SCOPE)
endfunction()
