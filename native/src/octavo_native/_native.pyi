from collections.abc import Iterable, Mapping
from typing import Final, TypedDict, final

ABI_LEVEL: Final[int]
PLACE_BITS: Final[int]
HAS_CUDA: Final[bool]
DTYPES: Final[Mapping[str, int]]
FORMATS: Final[Mapping[str, int]]
SCALINGS: Final[Mapping[str, int]]
OPERANDS: Final[Mapping[str, int]]
DIRECTIONS: Final[Mapping[str, int]]
LAYOUTS: Final[Mapping[str, int]]
ACTIVATIONS: Final[Mapping[str, int]]
GATED: Final[frozenset[str]]
GEMMS: Final[Mapping[str, int]]
NORMS: Final[Mapping[str, int]]
PROLOGUES: Final[Mapping[str, int]]

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

def build_info() -> BuildInfo: ...
def plan_words(rows: int, groups: int) -> int: ...
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
    into: Sequence | None = None,
) -> None: ...
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
) -> None: ...
def update_scales(
    *,
    cuda: bool,
    history: int,
    scale: int,
    maxima: Iterable[float],
    slots: int,
    groups: int,
    most_recent: bool,
    reduced: int = 0,
    stream: int = 0,
) -> None: ...

@final
class Sequence:
    def __init__(self, *, cuda: bool) -> None: ...
    def run(self, arrays: Iterable[int], stream: int = 0, threads: int = 1) -> None: ...
    def __len__(self) -> int: ...

@final
class Quantizer:
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
        dbias: bool = False,
        dprobs: bool = False,
    ) -> int: ...
    def run(
        self,
        *,
        cuda: bool,
        x: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        groups: int,
        matrix_rows: int = 0,
        plan: int = 0,
        row_codes: int = 0,
        row_scales: int = 0,
        row_global: int = 0,
        row_layout: int = 0,
        col_codes: int = 0,
        col_scales: int = 0,
        col_global: int = 0,
        col_layout: int = 0,
        encode_scales: int = 0,
        amax: int = 0,
        dequantized: int = 0,
        activated: int = 0,
        dbias: int = 0,
        seed: int = 0,
        group_offset: int = 0,
        group_offset_device: int = 0,
        unchanged: int = 0,
        prologue: int = 0,
        activation: int = 0,
        norm: int = 0,
        dy: int = 0,
        dy_stride: int = 0,
        probs: int = 0,
        dprobs: int = 0,
        gamma: int = 0,
        beta: int = 0,
        epsilon: float = 0.0,
        mean: int = 0,
        rstd: int = 0,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
        threads: int = 1,
        into: Sequence | None = None,
    ) -> None: ...
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
    ) -> None: ...
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
    ) -> None: ...

@final
class Gemm:
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
    ) -> None: ...
    def workspace_bytes(self, *, cuda: bool, rows: int, n: int, k: int, groups: int, tile: int = -1) -> int: ...
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
        tile: int = -1,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
        threads: int = 1,
        into: Sequence | None = None,
    ) -> None: ...
    def tiles(self) -> tuple[str, ...]: ...
    def tile(self, *, rows: int, n: int, k: int, groups: int, sms: int = 132, tile: int = -1) -> TileExpectation: ...

def swizzle_scales(
    *, cuda: bool, from_: int, into: int, outer: int, blocks: int, to_swizzled: bool, stream: int = 0
) -> None: ...
def pack_e2m1(*, cuda: bool, from_: int, into: int, rows: int, cols: int, pack: bool, stream: int = 0) -> None: ...
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
    stream: int = 0,
) -> None: ...
def permute_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
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
) -> None: ...
def combine_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
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
) -> None: ...
def dot_rows(
    *,
    cuda: bool,
    tokens: int,
    each: int,
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
) -> None: ...
def ffi_targets() -> dict[str, dict[str, object]]: ...
