from collections.abc import Mapping
from collections.abc import Sequence as _Sequence
from typing import Final, TypedDict

class BuildInfo(TypedDict):
    cuda: bool
    nvcc: str | None
    archs: tuple[str, ...]
    compiler: str
    avx2: bool

class TileExpectation(TypedDict):
    name: str
    tile: int
    tiles: int
    waves: float
    filled: float
    microseconds: float

ABI_LEVEL: Final[int]

HAS_CUDA: Final[bool]

DTYPES: Final[Mapping[str, int]]

FORMATS: Final[Mapping[str, int]]

SCALINGS: Final[Mapping[str, int]]

OPERANDS: Final[Mapping[str, int]]

DIRECTIONS: Final[Mapping[str, int]]

LAYOUTS: Final[Mapping[str, int]]

ACTIVATIONS: Final[Mapping[str, int]]

GATED: Final[frozenset[str]]

SCORES: Final[Mapping[str, int]]

NORMS: Final[Mapping[str, int]]

PROLOGUES: Final[Mapping[str, int]]

GEMMS: Final[Mapping[str, int]]

def build_info() -> BuildInfo:
    """
    What this build is made of: cuda (bool), nvcc (version or None), archs (tuple), compiler, avx2 (bool).
    """

PLACE_BITS: Final[int]

class Sequence:
    """
    Launches recorded once and run with other arrays each time, in one call.

    What takes `into` appends itself to the sequence that it gets as such. The arrays of a recorded
    launch are places, octavo_native.place(number, offset), 0 where there is none, or addresses in
    arrays that were named before; everything else is as it was recorded.
    """

    def __init__(self, *, cuda: bool) -> None: ...
    def name(self, start: int, bytes: int, replaces: bool = False) -> int:
        """
        The number of the array at this address, which is the next. Launches that are recorded from now on may
        have addresses in it for places. Arrays that share bytes with it are gone if it replaces them, as memory
        that was freed and allocated again does; else a ValueError.
        """

    def run(
        self, arrays: _Sequence[int], stream: int = 0, threads: int = 1, first: int = 0, end: int = 18446744073709551615
    ) -> None:
        """
        The launches from number `first` to before `end`, in order: on the arrays at these addresses, of which the
        first has number 1. An address of 0 means a null array, whatever the offset. ValueError and RuntimeError as
        the launches themselves raise them; those before have run.
        """

    def arrays(self) -> list[list[int]]:
        """The numbers of each launch's arrays, in the order of the launches."""

    def __len__(self) -> int: ...

def plan_words(rows: int, groups: int) -> int:
    """int64 words of the plan of `rows` rows in `groups` groups."""

def plan(
    *,
    cuda: bool,
    sizes: int,
    sizes_are_64: bool,
    groups: int,
    rows: int,
    plan: int,
    stream: int = 0,
    status: int = 0,
    bounded: int = 0,
    into: Sequence | None = None,
) -> None:
    """
    Write the plan of these group sizes: int64[plan_words(rows, groups)] at `plan`, 32-byte aligned.

    A negative size counts as 0 and rows past `rows` are cut off; either sets bit 0 of the int32 at `status`.
    `bounded`: int64 [groups], where the sizes that are left are written, too.
    """

class InputArgs:
    """
    What is quantized: x [rows, cols], rows `row_stride` elements apart, of a dtype of DTYPES.

    Ragged rows need a plan; with matrix_rows N, x is `groups` matrices [N, cols], rows = groups * N.
    With `index` int64 [rows], x is [count, cols] and row i is its row index[i] // each; zeros where
    index[i] is outside 0 to count * each - 1. With `mxfp4_scales` uint8 [rows, cols / 32], matrices x are MXFP4's
    codes, two per byte, and dtype is bfloat16: for CUDA, and E4M3 codes in square blocks of 128.

    interleaved_cols, interleaved_rows: columns of matrices, or their rows, are two halves that take turns in x in
    blocks of so many; what is quantized are the halves. For CUDA: bfloat16, aligned to 16 bytes; delayed and
    current scaling and square blocks of 128; blocks of 1 or of a multiple of 8, in halves of a multiple of 8.
    """

    def __init__(
        self,
        *,
        x: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        groups: int,
        matrix_rows: int = 0,
        plan: int = 0,
        index: int = 0,
        each: int = 1,
        count: int = 0,
        mxfp4_scales: int = 0,
        interleaved_cols: int = 0,
        interleaved_rows: int = 0,
    ) -> None: ...

class PlaneArgs:
    """
    The arrays of one plane, in a layout of LAYOUTS. global_: nvfp4's second-level factors [groups].

    values: bfloat16 of codes times block scales in the place of codes, and scales 0; of mxfp8, nvfp4.
    """

    def __init__(self, codes: int, scales: int, global_: int = 0, layout: int = 0) -> None: ...

class PrologueArgs:
    """
    What is applied to the input before it is quantized: a kind of PROLOGUES.

    activation, activation_grad: an activation of ACTIVATIONS; dy of the gradient, rows dy_stride
    elements apart; probs [rows] and, written by the gradient, dprobs [rows] and forward [rows, F],
    the activation's values. norm: one of NORMS with gamma, beta and epsilon; mean and rstd [rows]
    are written.
    """

    def __init__(
        self,
        *,
        kind: int,
        activation: int = 0,
        norm: int = 0,
        dy: int = 0,
        dy_stride: int = 0,
        probs: int = 0,
        dprobs: int = 0,
        forward: int = 0,
        gamma: int = 0,
        beta: int = 0,
        epsilon: float = 0.0,
        mean: int = 0,
        rstd: int = 0,
    ) -> None: ...

class Quantizer:
    """
    One way to quantize: octavo.QuantizerSpec in numbers of FORMATS, SCALINGS and OPERANDS.

    mxfp4: `run` rounds values to MXFP4's first, in blocks of 32 along rows or down columns, by
    a number of DIRECTIONS; for E4M3 codes in square blocks of 128, of bfloat16 or float32,
    and planes alone. None: it does not.

    square_columns: columnwise data of x have square blocks, and rowwise data have not; for
    blocks of 128.

    Immutable. Arrays are addresses, 0 where there is none; with cuda=True they are on the
    current device, work is put on `stream`, and nothing waits or allocates. ValueError says
    what of the arguments does not fit; RuntimeError is CUDA's own.
    """

    def __init__(
        self,
        *,
        format: int,
        scaling: int,
        operand: int = 0,
        square: bool = False,
        stochastic: bool = False,
        hadamard: bool = False,
        power_of_two: bool = False,
        amax_epsilon: float = 0.0,
        mxfp4: int | None = None,
        square_columns: bool = False,
    ) -> None: ...
    def workspace_bytes(
        self,
        *,
        cuda: bool,
        dtype: int,
        rows: int,
        cols: int,
        groups: int,
        rowwise: bool,
        columnwise: bool,
        matrix_rows: int = 0,
        prologue: int = 0,
        activation: int = 0,
        norm: int = 0,
        amax: bool = False,
        dequantized: bool = False,
        dbias: bool = False,
        dprobs: bool = False,
        count: int = 0,
    ) -> int:
        """
        Bytes of the workspace that `run` needs with these arguments; 256-byte aligned, undefined at entry.
        count: that of an input with an index, 0 without one.
        """

    def run(
        self,
        *,
        cuda: bool,
        input: InputArgs,
        rowwise: PlaneArgs | None = None,
        columnwise: PlaneArgs | None = None,
        prologue: PrologueArgs | None = None,
        encode_scales: int = 0,
        amax: int = 0,
        dequantized: int = 0,
        activated: int = 0,
        dbias: int = 0,
        seed: int = 0,
        group_offset: int = 0,
        group_offset_device: int = 0,
        unchanged: int = 0,
        ctas: int = 0,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
        threads: int = 1,
        into: Sequence | None = None,
    ) -> None:
        """
        Quantize the input, after the prologue if there is one, into the planes that are given.

        ctas: most CTAs of the kernels that stay on their multiprocessors for the whole call, with the same bits;
        0: as many as fit. Those are the kernels of activations but SwiGLU's, of their gradients and of norms. All
        others have a CTA for each tile, which ends within microseconds: ValueError where a call has these alone.
        The CPU takes any and has none.
        """

    def dequantize(
        self,
        *,
        cuda: bool,
        direction: int,
        codes: int,
        scales: int,
        rows: int,
        cols: int,
        groups: int,
        out: int,
        out_dtype: int,
        global_: int = 0,
        layout: int = 0,
        matrix_rows: int = 0,
        plan: int = 0,
        out_layout: int = 0,
        stream: int = 0,
        threads: int = 1,
        into: Sequence | None = None,
    ) -> None:
        """
        Values of one plane, rounded once to out_dtype: [rows, cols], or panels [P][cols][128].
        """

    def convert(
        self,
        *,
        cuda: bool,
        direction: int,
        to: int,
        codes: int,
        scales: int,
        into_codes: int,
        into_scales: int,
        rows: int,
        cols: int,
        groups: int,
        matrix_rows: int = 0,
        plan: int = 0,
        stream: int = 0,
        threads: int = 1,
    ) -> None:
        """One plane from the other layout to `to`, a number of LAYOUTS."""

class Gemm:
    """
    One grouped GEMM of a linear layer, in numbers of GEMMS, DTYPES, SCALINGS and FORMATS:

        fprop  y [M, N]     = x w[g]^T     left x, right w, both rowwise
        dgrad  dx [M, K]    = dy w[g]      left dy rowwise, right w columnwise
        wgrad  dw [G, N, K] = dy_g^T x_g   left dy, right x, both columnwise

    Immutable. Unquantized operands are arrays of `dtype`, x [M, K], dy [M, N], w [G, N, K];
    quantized ones the codes and scales of the plane that the GEMM reads, in the native layout
    (octavo_native.layouts), or with left_values, right_values its values and no scales.
    left_interleave, right_interleave: of wgrad of quantized operands, two halves of dw's rows
    or of its columns take turns in blocks of so many, with the bits of the halves; for CUDA a
    divisor of 32.
    Arrays are addresses, 0 where there is none; with cuda=True they are on the current
    device, work is put on `stream`, and nothing waits or allocates. ValueError says what of
    the arguments does not fit; RuntimeError is CUDA's own.
    """

    def __init__(
        self,
        *,
        gemm: int,
        quantized: bool,
        dtype: int = 2,
        scaling: int = 0,
        left_format: int = 0,
        right_format: int = 0,
        right_square: bool = False,
        hadamard: bool = False,
        out_dtype: int = 2,
        accumulate: bool = False,
        fast_accumulation: bool = False,
        left_square: bool = False,
        left_values: bool = False,
        right_values: bool = False,
        left_interleave: int = 0,
        right_interleave: int = 0,
    ) -> None: ...
    def workspace_bytes(self, *, cuda: bool, rows: int, n: int, k: int, groups: int, tile: int = -1) -> int:
        """
        Bytes of the workspace that `run` needs with these arguments; 256-byte aligned, undefined at entry.
        """

    def run(
        self,
        *,
        cuda: bool,
        rows: int,
        n: int,
        k: int,
        groups: int,
        plan: int,
        left: int,
        right: int,
        out: int,
        left_scales: int = 0,
        left_global: int = 0,
        left_stride: int = 0,
        right_scales: int = 0,
        right_global: int = 0,
        right_stride: int = 0,
        out_row_stride: int = 0,
        out_group_stride: int = 0,
        bias: int = 0,
        bias_dtype: int = 2,
        bias_scales: int = 0,
        left_index: int = 0,
        right_index: int = 0,
        each: int = 1,
        count: int = 0,
        tile: int = -1,
        ctas: int = 0,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
        threads: int = 1,
        into: Sequence | None = None,
    ) -> None:
        """
        Write the product to `out`: rows M, n out-features, k in-features. Strides are elements, 0: contiguous.

        Rows past the plan's sum are not read and come back as +0. wgrad of a group without rows is +0, or with
        accumulate what `out` holds. bias [G, N] of fprop, [G, K] of dgrad: y[r] = ... +
        bias_scales[r] * bias[g], with bias_scales [M]. With left_index or right_index, int64 [M], that ragged
        operand is an array of `count` rows and its row i is row index[i] // each; zeros where index[i] is outside
        0 to count * each - 1. It is unquantized, on CUDA bf16; or the left one of fprop or dgrad in block scaling,
        codes and scales in the plain layout of `count` rows, on CUDA both operands e4m3 and the weights in square
        blocks.
        tile: a number of `tiles`, -1 for the model's choice (CUDA).
        ctas: most CTAs of the product, each of which has a multiprocessor to itself, with the same bits; 0: one
        for each multiprocessor. The CPU takes any and has none.
        """

    def tiles(self) -> tuple[str, ...]:
        """
        Names of the tiles that the CUDA kernels of this GEMM come in, by number.
        """

    def tile(self, *, rows: int, n: int, k: int, groups: int, sms: int = 132, tile: int = -1) -> TileExpectation:
        """
        What the model expects of a tile (-1: of the one that it chooses) for M rows in equal groups:

        name; tile, its number; tiles that are computed; waves, tiles per CTA; filled, part of the computed outputs
        that the result has; microseconds. Host arithmetic alone.
        """

def record_amax(
    *,
    cuda: bool,
    amax: int,
    history: int,
    operands: int,
    slots: int,
    groups: int,
    stream: int = 0,
    into: Sequence | None = None,
) -> None:
    """
    Raise slot 0 of a float32 history [operands, slots, groups] to amax [operands, groups]; NaN is not recorded.
    """

def update_scales(
    *,
    cuda: bool,
    history: int,
    scale: int,
    maxima: _Sequence[float],
    slots: int,
    groups: int,
    most_recent: bool,
    reduced: int = 0,
    stream: int = 0,
) -> None:
    """
    End a step of delayed scaling: history [operands, slots, groups] and scale [operands, groups], in place.

    maxima: of each operand's format, less the margin. reduced: amax [operands, groups] over all ranks, which
    stands for slot 0 where it is not 0 or NaN.
    """

def swizzle_scales(
    *, cuda: bool, from_: int, into: int, outer: int, blocks: int, to_swizzled: bool, stream: int = 0
) -> None:
    """
    One-byte block scales [outer, blocks] to Blackwell's tiles of 128 x 4, padded with zeros, or back.
    """

def pack_e2m1(*, cuda: bool, from_: int, into: int, rows: int, cols: int, pack: bool, stream: int = 0) -> None:
    """
    One-byte E2M1 codes [rows, cols] to two per byte [rows, ceil(cols / 2)], the even column low, or back.
    """

def expand_mxfp4(
    *, cuda: bool, codes: int, scales: int, blocks: int, out: int, out_dtype: int, stream: int = 0
) -> None:
    """
    MXFP4, packed E2M1 [blocks, 16] and E8M0 [blocks], to values [blocks, 32], rounded once to out_dtype.
    """

def route(
    *,
    cuda: bool,
    index: int,
    choices: int,
    groups: int,
    group_sizes: int,
    order: int,
    position: int,
    routed: int,
    counts: int = 0,
    stream: int = 0,
    into: Sequence | None = None,
) -> None:
    """
    Sort int64 `index` [choices] stably by group: int64 sizes [groups], order and its inverse position [choices],
    one byte per choice in `routed`. A number outside 0 to groups - 1 names no group and is sorted last.
    `counts` is a workspace of route_workspace bytes, or 0, with which a GPU takes less time.
    """

def route_workspace(choices: int, groups: int) -> int:
    """Bytes of route's workspace on a GPU; 0 where it has no use for one."""

def permute_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
    row_count: int,
    position: int,
    routed: int,
    weights: int,
    dtype: int,
    cols: int,
    from_: int,
    stride: int,
    out: int,
    stream: int = 0,
    threads: int = 1,
    into: Sequence | None = None,
) -> None:
    """
    out[position[t, j]] = weights[t, j] * from[t], from [tokens, cols] and out [row_count, cols] of `dtype`.

    Zeros where routed[t, j] is 0, or nothing with fewer rows than choices; copies of bits where fp32 `weights` is 0.
    """

def combine_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
    row_count: int,
    position: int,
    routed: int,
    weights: int,
    dtype: int,
    cols: int,
    from_: int,
    stride: int,
    out: int,
    stream: int = 0,
    threads: int = 1,
    into: Sequence | None = None,
) -> None:
    """
    out[t] = the sum over j of weights[t, j] * from[position[t, j]] where routed[t, j], in fp32 in the order of j.
    """

def dot_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
    row_count: int,
    position: int,
    routed: int,
    dtype: int,
    cols: int,
    rows: int,
    row_stride: int,
    dy: int,
    dy_stride: int,
    out: int,
    stream: int = 0,
    threads: int = 1,
    into: Sequence | None = None,
) -> None:
    """
    out[t, j] = rows[position[t, j]] . dy[t] in fp32, 0 where routed[t, j] is 0: the gradient of combine's weights.
    """

class RouterRule:
    """How a router chooses: octavo_numerics.RouterRule, `score` by number."""

    def __init__(
        self, *, k: int, score: int, groups: int = 1, kept_groups: int = 1, renormalize: bool = True, scale: float = 1.0
    ) -> None: ...

class Logits:
    """Addresses of logits [tokens, experts], rows `stride` elements apart."""

    def __init__(self, *, data: int, dtype: int, tokens: int, experts: int, stride: int) -> None: ...

def choose_experts(
    *,
    cuda: bool,
    rule: RouterRule,
    logits: Logits,
    bias: int,
    replay: int,
    choices: int,
    weights: int,
    counts: int,
    stream: int = 0,
    threads: int = 1,
) -> None:
    """
    The choices of each token, int64 [tokens, k], their fp32 weights, and int64 counts [experts].

    fp32 `bias` [experts] is added for choosing alone, int64 `replay` [tokens, k] are choices to take; 0: none.
    """

def choose_gradient(
    *,
    cuda: bool,
    rule: RouterRule,
    logits: Logits,
    choices: int,
    dweights: int,
    dlogits: int,
    stream: int = 0,
    threads: int = 1,
) -> None:
    """
    The gradient of the logits, [tokens, experts] in their dtype, from that of the weights.
    """

def interleave_halves(
    *,
    cuda: bool,
    from_: int,
    into: int,
    rows: int,
    blocks: int,
    block_bytes: int,
    interleave: bool,
    stream: int = 0,
    threads: int = 1,
) -> None:
    """
    Rows of two halves [rows, 2, blocks, block_bytes] to blocks that take turns [rows, blocks, 2, block_bytes], or back.
    """

class AdamWRule:
    """
    Hyperparameters of AdamW; with `lr_device`, the address of one fp32 number, `lr` is not read.
    """

    def __init__(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, lr_device: int = 0
    ) -> None: ...

class AdamWDraws:
    """
    What a step's random bits depend on: the seed, the tensor's number, and the step's, from 1 on.

    step_device: the address of one fp32 number, which is read instead of `step`.
    first_row: where the array is part of a tensor, the number of its first row there.
    """

    def __init__(
        self, *, seed: int = 0, tensor: int = 0, step: int = 1, step_device: int = 0, first_row: int = 0
    ) -> None: ...

class AdamWArrays:
    """
    Arrays [rows, cols]: master, grad and values as (address, dtype of DTYPES).

    moments are fp32; or 8-bit codes, where int32 tops [rows, ceil(cols / 128)] are given.
    values, bf16 or fp16, gets the new master rounded to nearest.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int],
        master: tuple[int, int],
        grad: tuple[int, int],
        moments: tuple[int, int],
        tops: tuple[int, int] = (0, 0),
        values: tuple[int, int] = (0, 2),
    ) -> None: ...

class AdamWCodes:
    """
    Planes that get codes of the new master, cast to bf16: E4M3 in square blocks of 128 of
    stacked matrices. A plane without codes is not written.
    """

    def __init__(
        self,
        *,
        matrix_rows: int,
        rowwise: PlaneArgs,
        columnwise: PlaneArgs,
        amax_epsilon: float = 0.0,
        power_of_two: bool = False,
    ) -> None: ...

def adamw_step(
    *,
    cuda: bool,
    arrays: AdamWArrays,
    rule: AdamWRule,
    draws: AdamWDraws,
    codes: AdamWCodes | None = None,
    inverse_scale: int = 0,
    skip: int = 0,
    stream: int = 0,
) -> None:
    """
    One step, in place: moments, master, and values or codes of it. On CUDA alone.

    inverse_scale: the address of one fp32 number that multiplies grad. skip: of one byte; where it is not 0,
    nothing is changed.
    """

def ffi_targets() -> dict[str, dict[str, object]]:
    """Handlers for XLA: platform (cpu, CUDA) to target name to capsule."""

def ffi_plane_shapes(
    *,
    format: int,
    scaling: int,
    direction: int,
    layout: int,
    square: bool,
    hadamard: bool,
    rows: int,
    cols: int,
    groups: int,
    matrix_rows: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Shapes of codes and scales that the handlers for XLA require of one plane.
    """
