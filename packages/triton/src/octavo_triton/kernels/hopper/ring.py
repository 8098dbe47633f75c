"""What the products on Hopper share: the ring of stages between the warp that fetches and those that multiply.

A program has three roles, which start together and walk over the same tiles of the result, every gl.num_programs(0)th:

  fetch      one warp; it copies 128 rows and 128 codes of each operand into a free stage
  multiply   two groups of four warps, each with its own 128 of a tile's 256 columns: 64 rows at a time are multiplied,
             128 codes deep, and added to the sums in fp32. While one promotes, the other has the tensor cores

A stage is `full` when its bytes have arrived and `empty` when both groups have read it. One thread of a group executes
`mbarrier.arrive`; Triton puts a barrier of the group's warps in front of it, so that all of them have read the stage.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Copies a descriptor's tile into a stage and counts its bytes at a barrier; Triton 3.6 knows it by the second name."""

COLUMNS = gl.constexpr(256)
"""Of a tile; its rows are 128, of which a group multiplies 64 at a time."""
STAGES = gl.constexpr(4)
REGISTERS = gl.constexpr([240, 24])
"""Of a thread that multiplies, and of one that fetches."""
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
"""64 x 128 sums in four warps."""
LARGEST = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def ring(LENGTH: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) barriers of LENGTH stages, ready for every warp; READERS groups of warps read each stage."""
    full = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(LENGTH):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def to_fill(full, empty, at, BYTES: gl.constexpr):
    """The stage of turn `at`, free again, and its barrier, which now expects BYTES."""
    slot = at % STAGES
    mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    return slot, full.index(slot)


@gluon.jit
def multiplied(left, right, FROM: gl.constexpr, PART: gl.constexpr):
    """64 rows of `left` times 128 of `right`, both [.., 128] codes in shared memory: sums of 14 bits, none goes on."""
    zero = gl.zeros([64, 128], gl.float32, SUMS)
    rows = left.slice(FROM, 64, dim=0)
    columns = right.slice(PART * 128, 128, dim=0).permute((1, 0))
    product = warpgroup_mma(rows, columns, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def added(total, product):
    """total + product, made before the next product begins: put off, it would hold 64 more registers of each thread."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=r,r,r", [total, product], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def scaled(total, a_scale, b_scale):
    """Sums times two decode scales together, see operands.times_scales."""
    return total * gl.minimum(a_scale * b_scale, LARGEST)


@gluon.jit
def write(out, value, first, end, column, columns, out_row, out_column):
    """64 x 128 fp32 sums from row `first` and `column` on, rounded once; none past `end` and `columns`."""
    if out.dtype.element_ty == gl.float32:
        layout: gl.constexpr = SUMS
    else:
        # a thread then stores 16 bytes at once; in the sums' own arrangement it has 4 together
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, 128, gl.SliceLayout(0, layout))
    real = (row < end)[:, None] & (j < columns)[None, :]
    gl.store(out + row[:, None] * out_row + j[None, :] * out_column, value, mask=real)
