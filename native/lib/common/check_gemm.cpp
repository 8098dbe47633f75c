// Argument checks of the grouped GEMMs, shared by both devices. Pointers are compared and never dereferenced.
#include "check_operand.h"
#include "gemm_strides.h"
#include "octavo/gemm.h"

namespace octavo {

namespace {

constexpr int64_t CUDA_BYTES = 16, CUDA_SIDE = 16;
constexpr int64_t MAX_GROUP_STRIDE = int64_t{1} << 44;      // 65 536 of them still fit an address
constexpr int64_t MOST_GATHERED_STRIDE = int64_t{1} << 30;  // its bytes fit 32 bits
constexpr int64_t MOST_INTERLEAVE_CUDA = 32;                // rows or columns in turns: 64 of them are in every tile

bool group_scales(Scaling scaling) { return scaling == Scaling::delayed || scaling == Scaling::current; }

Error check_names(const GemmSpec& spec) {
  if (!named(spec.gemm, Gemm::wgrad)) return invalid("gemm is not a valid Gemm; give fprop, dgrad or wgrad (0 to 2)");
  if (!named(spec.dtype, DType::bf16)) return invalid("dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (!named(spec.out_dtype, DType::bf16))
    return invalid("out_dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (!named(spec.scaling, Scaling::nvfp4)) return invalid("scaling is not a valid Scaling; give a number from 0 to 5");
  if (!named(spec.left_format, Format::e2m1) || !named(spec.right_format, Format::e2m1)) {
    return invalid("left_format or right_format is not a valid Format; give e4m3, e5m2 or e2m1 (0 to 2)");
  }
  return {};
}

Error check_options(const GemmSpec& spec, bool cuda) {
  if (spec.accumulate && spec.gemm != Gemm::wgrad) {
    return invalid("accumulate was given and the GEMM is not wgrad; only weight gradients add to `out`, so drop it");
  }
  if ((spec.left_values || spec.right_values) && !(spec.quantized && is_emulated(spec.scaling))) {
    return invalid("left_values or right_values was given and the scaling is not mxfp8 or nvfp4; leave both false");
  }
  if (!spec.quantized) {
    if (spec.left_square || spec.right_square || spec.hadamard || spec.fast_accumulation) {
      return invalid(
          "left_square, right_square, hadamard or fast_accumulation was given and the operands are not quantized; "
          "leave all four false, or set quantized");
    }
    if (cuda && spec.dtype == DType::f32) {
      return unsupported(
          "dtype is f32 and the CUDA kernels multiply 16-bit operands; cast them to bf16 or f16, or quantize them");
    }
    return {};
  }
  const bool fours = spec.scaling == Scaling::nvfp4;
  if (fours != (spec.left_format == Format::e2m1) || fours != (spec.right_format == Format::e2m1)) {
    return invalid(
        "a format and the scaling do not go together; e2m1 goes with nvfp4 on both sides, and nothing else does with "
        "either");
  }
  if (spec.right_square && spec.gemm == Gemm::wgrad && spec.scaling != Scaling::block) {
    return invalid(
        "right_square was given and the right operand of wgrad is x, which has square blocks with block scaling alone; "
        "drop it");
  }
  if (spec.left_square && (spec.gemm != Gemm::wgrad || spec.scaling != Scaling::block || spec.right_square)) {
    return invalid("left_square is for wgrad of x on the left with block scaling; leave it false with others");
  }
  if (spec.right_square && block_size(spec.scaling) == 0) {
    return invalid("right_square was given and the scaling has no blocks; it goes with block, mxfp8 and nvfp4");
  }
  if (spec.hadamard && (spec.gemm != Gemm::wgrad || !fours)) {
    return invalid("hadamard was given and is for wgrad of nvfp4 alone; leave it false with other GEMMs and scalings");
  }
  if (spec.fast_accumulation && !group_scales(spec.scaling) && spec.scaling != Scaling::row) {
    return invalid(
        "fast_accumulation was given and the scaling has blocks, whose sums are promoted at each; it is an option of "
        "delayed, current and row");
  }
  return {};
}

Error check_sides(const GemmArgs& args, bool cuda) {
  if (const Error error = check_counts(args.rows, args.groups)) return error;
  if (args.n < 1 || args.k < 1) return invalid("n or k is less than 1; give the layer's out-features and in-features");
  if (args.k > MAX_COLS) return invalid("k is past 2^30; split the layer");
  if (args.n > MAX_ROWS / args.groups) return invalid("groups * n is past 2^30; split the call by groups");
  if (cuda && (args.n % CUDA_SIDE != 0 || args.k % CUDA_SIDE != 0)) {
    return unsupported(
        "n or k is not a multiple of 16, as the CUDA kernels need; pad the layer's weights, or choose another backend");
  }
  return {};
}

// Halves of dw's rows or columns that take turns.
Error check_interleaved(const GemmArgs& args, bool cuda) {
  const GemmSpec& spec = args.spec;
  const int64_t left = spec.left_interleave, right = spec.right_interleave;
  if (left == 0 && right == 0) return {};
  if (left < 0 || right < 0 || (left && right)) {
    return invalid(
        "left_interleave or right_interleave is negative, or both are given; give one of them, 1 or more, or 0");
  }
  if (spec.gemm != Gemm::wgrad || !spec.quantized) {
    return invalid(
        "left_interleave or right_interleave was given, and they are for wgrad of quantized operands; leave both 0");
  }
  if (left ? spec.left_square : spec.right_square) {
    return invalid("an operand in square blocks is x, whose columns are not halves; give the other side's interleave");
  }
  const int64_t side = left ? args.n : args.k, block = left + right;
  if (side % 2 || side / 2 % block) {
    return invalid("left_interleave does not divide half of n, or right_interleave half of k; give a divisor of half");
  }
  if (cuda && MOST_INTERLEAVE_CUDA % block) {
    return unsupported(
        "left_interleave or right_interleave does not divide 32, as the CUDA kernels need; give the product in halves "
        "and interleave it");
  }
  return {};
}

// Codes of tokens, which are those of their rows where no other row has a say in them.
Error check_index_of_codes(const GemmArgs& args, bool cuda) {
  const GemmSpec& spec = args.spec;
  if (spec.gemm == Gemm::wgrad || spec.scaling != Scaling::block) {
    return invalid(
        "an index was given with codes that depend on other rows, too; codes of tokens are those of fprop's and "
        "dgrad's left operand with block scaling, so leave it null");
  }
  if (cuda && (spec.left_format != Format::e4m3 || spec.right_format != Format::e4m3 || !spec.right_square)) {
    return unsupported(
        "an index was given with codes, of which the CUDA kernels gather e4m3 beside e4m3 weights in square blocks; "
        "permute the rows");
  }
  return {};
}

// Rows of an operand that stand where a router's tokens do.
Error check_indices(const GemmArgs& args, bool cuda) {
  const GemmSpec& spec = args.spec;
  if (const Error error = check_row_index(args.left.index)) return error;
  if (const Error error = check_row_index(args.right.index)) return error;
  const bool left = args.left.index.of_rows, right = args.right.index.of_rows;
  if (!left && !right) return {};
  if (left && right) return invalid("both operands have an index; permute the rows of one of them");
  if (right && spec.gemm != Gemm::wgrad) {
    return invalid("the right operand has an index and is a weight; an index is for ragged rows, so leave it null");
  }
  if (spec.quantized) return check_index_of_codes(args, cuda);
  if (cuda && spec.dtype != DType::bf16) {
    return unsupported(
        "an index was given and dtype is not bf16, which alone the CUDA kernels gather; permute the rows");
  }
  if (cuda && (left ? args.left : args.right).row_stride > MOST_GATHERED_STRIDE) {
    return unsupported("an operand with an index has a row_stride past 2^30 elements; copy its rows closer together");
  }
  return {};
}

// Takes resolved strides: none that matters is 0.
Error check_strides(const GemmArgs& args) {
  const GemmSpec& spec = args.spec;
  if (spec.quantized && (args.left.row_stride != 0 || args.right.row_stride != 0)) {
    return invalid("a row_stride was given and quantized operands are laid out without strides; leave both 0");
  }
  if (!spec.quantized && (args.left.row_stride < left_cols(args) || args.right.row_stride < right_cols(args))) {
    return invalid(
        "left.row_stride or right.row_stride is less than the operand's columns; give the elements from one row to "
        "the next, or 0 where rows follow each other");
  }
  if (args.out_row_stride < out_cols(args)) {
    return invalid(
        "out_row_stride is less than the columns of `out`; give the elements from one row to the next, or 0 where "
        "rows follow each other");
  }
  if (args.left.row_stride > MAX_STRIDE || args.right.row_stride > MAX_STRIDE || args.out_row_stride > MAX_STRIDE) {
    return invalid("a row stride is past 2^32 elements; copy the rows closer together");
  }
  if (spec.gemm != Gemm::wgrad) return {};
  if (args.out_group_stride > MAX_GROUP_STRIDE) {
    return invalid("out_group_stride is past 2^44 elements; copy the weight gradients closer together");
  }
  if (args.out_group_stride < (args.n - 1) * args.out_row_stride + args.k) {
    return invalid(
        "out_group_stride is less than one weight gradient takes; give the elements from one [n, k] to the next, or 0 "
        "where they follow each other");
  }
  return {};
}

Error check_operand(const GemmSpec& spec, const GemmOperand& operand, bool values, bool cuda) {
  if (operand.data == nullptr) {
    return invalid("left.data or right.data is null and there are rows; give both operands of the product");
  }
  if (!spec.quantized) {
    if (operand.scales != nullptr || operand.global != nullptr) {
      return invalid("an operand has scales and `quantized` is not set; set it, or leave the scales null");
    }
    if (!aligned(operand.data, dtype_bytes(spec.dtype))) {
      return invalid("an operand is not aligned to its elements; give an address that is a multiple of their size");
    }
  } else {
    if (values && operand.scales != nullptr) {
      return invalid("an operand of values has scales, which are in the values; leave them null");
    }
    if (!values && operand.scales == nullptr) {
      return invalid("a quantized operand has no scales; give its decode scales");
    }
    if (values && !aligned(operand.data, 2)) {
      return invalid("an operand of values is not aligned to its elements; give an address that is a multiple of 2");
    }
    if (!aligned(operand.scales, wide_scales(spec.scaling) ? 4 : 1)) {
      return invalid("an operand's scales are not aligned to 4 bytes; they are fp32");
    }
    if ((spec.scaling == Scaling::nvfp4) != (operand.global != nullptr)) {
      return invalid("global and scaling do not fit; nvfp4 needs [groups] fp32 on both sides, others have none");
    }
    if (!aligned(operand.global, 4)) return invalid("an operand's global is not aligned to 4 bytes; it is fp32");
  }
  if (cuda && !aligned(operand.data, CUDA_BYTES)) {
    return invalid("an operand is not aligned to 16 bytes, as the CUDA kernels need; allocate it so");
  }
  if (cuda && spec.quantized && block_size(spec.scaling) != 0 && !aligned(operand.scales, CUDA_BYTES)) {
    return invalid("an operand's block scales are not aligned to 16 bytes, as the CUDA kernels need; allocate them so");
  }
  if (cuda && !spec.quantized && operand.row_stride * dtype_bytes(spec.dtype) % CUDA_BYTES != 0) {
    return invalid(
        "an operand's row_stride is not a multiple of 16 bytes, as the CUDA kernels need; give one that is a multiple "
        "of 8 elements");
  }
  return {};
}

Error check_out(const GemmArgs& args, bool cuda) {
  const int64_t bytes = dtype_bytes(args.spec.out_dtype);
  if (args.out == nullptr && (args.rows > 0 || args.spec.gemm == Gemm::wgrad)) {
    return invalid("out is null; give the address of the result");
  }
  if (!aligned(args.out, bytes)) {
    return invalid("out is not aligned to its elements; give an address that is a multiple of their size");
  }
  if (!cuda) return {};
  if (!aligned(args.out, CUDA_BYTES)) {
    return invalid("out is not aligned to 16 bytes, as the CUDA kernels need; allocate it so");
  }
  const bool groups = args.spec.gemm == Gemm::wgrad;
  if (args.out_row_stride * bytes % CUDA_BYTES != 0 || (groups && args.out_group_stride * bytes % CUDA_BYTES != 0)) {
    return invalid("a stride of out is not a multiple of 16 bytes, as the CUDA kernels need; give one that is");
  }
  return {};
}

Error check_bias(const GemmArgs& args) {
  if (args.bias == nullptr) {
    if (args.bias_scales != nullptr) {
      return invalid("bias_scales was given without a bias; give the bias too, or leave both null");
    }
    return {};
  }
  if (args.spec.gemm == Gemm::wgrad) return invalid("bias was given and the GEMM is wgrad; leave it null");
  if (!named(args.bias_dtype, DType::bf16))
    return invalid("bias_dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (!aligned(args.bias, dtype_bytes(args.bias_dtype))) {
    return invalid("bias is not aligned to its elements; give an address that is a multiple of their size");
  }
  if (!aligned(args.bias_scales, 4)) return invalid("bias_scales is not aligned to 4 bytes; it is fp32 [rows]");
  return {};
}

Error check_tile(const GemmArgs& args) {
  if (args.tile == -1) return {};
  int count = 0;
  gemm_tiles(args.spec, &count);
  if (args.tile < -1 || args.tile >= count) {
    return invalid(
        "tile is not a tile number of this GEMM (Gemm.tiles lists them); give one of them, or -1 to have it chosen");
  }
  return {};
}

}  // namespace

Error check_gemm(const GemmArgs& given, bool cuda) {
  if (const Error error = check_names(given.spec)) return error;
  if (const Error error = check_options(given.spec, cuda)) return error;
  if (const Error error = check_sides(given, cuda)) return error;
  if (const Error error = check_interleaved(given, cuda)) return error;
  if (const Error error = check_indices(given, cuda)) return error;
  const GemmArgs args = with_strides(given);
  if (const Error error = check_strides(args)) return error;
  if (args.rows > 0) {
    if (args.plan == nullptr) {
      return invalid("plan is null and there are rows; make one from the group sizes with plan_cpu or plan_cuda");
    }
    if (const Error error = check_operand(args.spec, args.left, args.spec.left_values, cuda)) return error;
    if (const Error error = check_operand(args.spec, args.right, args.spec.right_values, cuda)) return error;
  }
  if (!aligned(args.plan, PLAN_ALIGNMENT)) return invalid("plan is not aligned to 32 bytes; allocate it so");
  if (const Error error = check_out(args, cuda)) return error;
  if (const Error error = check_bias(args)) return error;
  if (const Error error = check_ctas(args.ctas)) return error;
  return check_tile(args);
}

}  // namespace octavo
