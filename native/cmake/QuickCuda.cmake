# octavo_quick_cuda(target): CUDA kernels where OCTAVO_CUDA_OPTIMIZE is OFF, as fast as nvcc makes PTX of them.
# Not in Cuda.cmake: native/tools/kernels.md names a digest of that, and nothing here is of kernels as they are shipped.

# Reading headers takes longer than compiling most files, so files of which no two have a name in common are one.
set(octavo_together_quantize quantize/* activations/* turns/* weights/* reductions/dprobs)
set(octavo_together_calls calls/* planes/convert planes/dequantize planes/interleave_scales)
set(octavo_together_optimizers optimizers/* rows/permute scaling/delayed)
set(octavo_together_products products/* planes/expand planes/spread_scales)

function(octavo_quick_cuda target)
  foreach(group IN ITEMS calls optimizers products quantize)
    list(TRANSFORM octavo_together_${group} REPLACE "^(.+)$" "lib/cuda/\\1.cu" OUTPUT_VARIABLE patterns)
    file(GLOB files CONFIGURE_DEPENDS ${patterns})
    set_source_files_properties(${files} PROPERTIES UNITY_GROUP ${group})
  endforeach()

  # Since 12.9 nvcc has a flag for fast compilation, with which cicc takes half of its time without optimization. And
  # ptxas, which would only read the PTX once more, prints its version instead.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
    get_target_property(options ${target} COMPILE_OPTIONS)
    string(REPLACE "SHELL:-Xcicc -O0" "--Ofast-compile=max;SHELL:-Xptxas --version" options "${options}")
    set_target_properties(${target} PROPERTIES COMPILE_OPTIONS "${options}")
  endif()
endfunction()
