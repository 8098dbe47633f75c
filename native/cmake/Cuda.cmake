# OCTAVO_HAS_CUDA, OCTAVO_CUDA_ARCHS, OCTAVO_NVCC and octavo_cuda_options(target): the CUDA kernels where there is an nvcc.
set(OCTAVO_CUDA AUTO CACHE STRING "CUDA kernels: AUTO, ON or OFF")
set_property(CACHE OCTAVO_CUDA PROPERTY STRINGS AUTO ON OFF)

# OFF is for tests where no kernel runs: PTX without optimization, which ptxas never sees, in a tenth of the time.
option(OCTAVO_CUDA_OPTIMIZE "Optimize CUDA kernels, and compile them to machine code" ON)

set(OCTAVO_HAS_CUDA OFF)
set(OCTAVO_CUDA_ARCHS "")
set(OCTAVO_NVCC "")
if(NOT OCTAVO_CUDA STREQUAL "OFF")
  # Hopper's wgmma and setmaxnreg exist in sm_90a alone, not in sm_90.
  if(OCTAVO_CUDA_OPTIMIZE)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 90a-virtual)
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(OCTAVO_HAS_CUDA ON)
    set(OCTAVO_CUDA_ARCHS sm_90a)
    set(OCTAVO_NVCC "${CMAKE_CUDA_COMPILER_VERSION}")
    if(NOT OCTAVO_CUDA_OPTIMIZE)
      string(APPEND OCTAVO_NVCC ", not optimized")
    endif()
  elseif(OCTAVO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "OCTAVO_CUDA=ON needs nvcc 12.8 or newer on the PATH, or CUDACXX; none was found")
  else()
    message(STATUS "No nvcc: octavo-native is built for CPUs alone")
  endif()
endif()

if(OCTAVO_HAS_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.8 or newer is needed; upgrade the CUDA "
    "toolkit, or build for CPUs alone with OCTAVO_CUDA=OFF")
endif()

# -fmad=false: as -ffp-contract=off on the host. -v: native/tools/ptxas_report.py reads what ptxas prints.
# --compress-mode=size: kernels in a wheel take a third of the room (nvcc 12.8 and newer). For PTX without optimization
# that would be two fifths of the time; and four folders there are one file each, because reading their headers is more.
function(octavo_cuda_options target)
  if(OCTAVO_CUDA_OPTIMIZE)
    set(optimization "-O3;SHELL:-Xptxas -v,-warn-spills,-warn-lmem-usage")
    set(compression size)
  else()
    set(optimization "-O0;SHELL:-Xcicc -O0")
    set(compression speed)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    foreach(folder IN ITEMS calls optimizers products quantize)
      file(GLOB files CONFIGURE_DEPENDS lib/cuda/${folder}/*.cu)
      set_source_files_properties(${files} PROPERTIES UNITY_GROUP ${folder})
    endforeach()
  endif()
  if(SKBUILD)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=${compression}>")
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-Xcompiler=-ffp-contract=off;-Xcompiler=-fvisibility=hidden;${optimization}>")
endfunction()
