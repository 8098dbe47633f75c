"""wgrad of FP8 codes on Hopper by warps without roles: four of them fetch, multiply and promote, one after the other.

jax-triton starts only the warps that a kernel begins with, so it cannot start those of ring, which have roles. Here two
programs share a multiprocessor: while one promotes, stores or begins, the other has the tensor cores. Each makes one
tile of 128 x 128 sums, 64 rows at a time, with the bits of hopper_columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo_triton.kernels.hopper.columns import finish, place
from octavo_triton.kernels.hopper.ring import SUMS, added, copy_tile, multiplied, ring

STAGES = gl.constexpr(3)
"""With four, two programs do not fit into a multiprocessor's shared memory."""


@gluon.jit
def fetch(
    a, a_scale, b, b_scale, panel, n, k, height, width, step, a_tiles, a_scales, b_tiles, b_scales, full,
    SCALING: gl.constexpr,
):  # fmt: skip
    """A panel's rows of a and b, and the scales of both, into the stage of `step`."""
    slot = step % STAGES
    arrived = full.index(slot)
    # bytes of 128 codes, and of their fp32 scale
    mbarrier.expect(arrived, 256 * (132 if SCALING == "block" else 128))
    copy_tile(a, [(panel + step) * height + n, 0], arrived, a_tiles.index(slot))
    copy_tile(b, [(panel + step) * width + k, 0], arrived, b_tiles.index(slot))
    if SCALING == "block":
        copy_tile(a_scale, [panel + step, n], arrived, a_scales.index(slot))
        copy_tile(b_scale, [panel + step, k], arrived, b_scales.index(slot))


@gluon.jit
def promoted(total, product, rows, columns, FROM: gl.constexpr):
    """total + product times the scales, as in columns, and as `added` made before the next product begins."""
    of_rows = rows.reshape([128]).slice(FROM, 64).load(gl.SliceLayout(1, SUMS))
    of_columns = columns.reshape([128]).load(gl.SliceLayout(0, SUMS))
    left, right = gl.broadcast(of_rows[:, None], of_columns[None, :])
    return gl.inline_asm_elementwise(
        "{ .reg .f32 scale; mul.rz.f32 scale, $3, $4; fma.rn.f32 $0, $2, scale, $1; }",
        "=r,r,r,r,r",
        [total, product, left, right],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def undivided_columns(
    a, a_scale, b, b_scale, table, out, height, width, groups, down, across, out_group, out_row, out_column,
    SCALING: gl.constexpr, BESIDE: gl.constexpr, EVEN: gl.constexpr = False,
):  # fmt: skip
    """out[g, n, k] = sum over the rows r of g of a[r, n] b[r, k]; its arguments are those of hopper_columns, where
    b_scale has blocks of 128 columns, too."""
    if EVEN:  # see formats.multiple_of_16
        height = height // 16 * 16
        width = width // 16 * 16
        out_group = out_group // 16 * 16
        out_row = out_row // 16 * 16
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, 128, 128], b.layout)
    if SCALING == "block":
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], a_scale.layout)
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], b_scale.layout)
    else:
        a_scales: gl.constexpr = None  # type: ignore[no-redef]
        b_scales: gl.constexpr = None  # type: ignore[no-redef]
    full, empty = ring(STAGES, 1)
    group, steps, panel, n, k = place(gl.program_id(0), table, groups, down, across, BESIDE)
    n = n * 128
    k = k * 128
    for stage in gl.static_range(STAGES):
        if stage < steps:
            fetch(
                a, a_scale, b, b_scale, panel, n, k, height, width, stage, a_tiles, a_scales, b_tiles, b_scales,
                full, SCALING,
            )  # fmt: skip
    upper = gl.zeros([64, 128], gl.float32, SUMS)
    lower = gl.zeros([64, 128], gl.float32, SUMS)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 0, 0)
        if SCALING == "block":
            upper = promoted(upper, product, a_scales.index(slot), b_scales.index(slot), 0)
        else:
            upper = added(upper, product)
        product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 64, 0)
        if SCALING == "block":
            lower = promoted(lower, product, a_scales.index(slot), b_scales.index(slot), 64)
        else:
            lower = added(lower, product)
        if step + STAGES < steps:
            # every warp has read the stage
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.wait(empty.index(slot), phase)
            fetch(
                a, a_scale, b, b_scale, panel, n, k, height, width, step + STAGES,
                a_tiles, a_scales, b_tiles, b_scales, full, SCALING,
            )  # fmt: skip
    finish(
        upper, a_scale, b_scale, out, group, steps, n, k, height, width,
        out_group, out_row, out_column, SCALING, False,
    )  # fmt: skip
    finish(
        lower, a_scale, b_scale, out, group, steps, n + 64, k, height, width,
        out_group, out_row, out_column, SCALING, False,
    )  # fmt: skip
