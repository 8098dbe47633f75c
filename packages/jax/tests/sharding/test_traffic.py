"""Collectives and custom calls of a compiled program, by kind, shape and bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from octavo_jax.traffic import ArrayShape, CustomCall, collectives, custom_calls

GPU_TEXT = """
HloModule jit_step, entry_computation_layout={(bf16[8,64]{1,0})->bf16[2,64]{1,0}}
%wrapped (p: bf16[8,64]) -> bf16[2,64] {
  ROOT %reduce-scatter.1 = bf16[2,64]{1,0} reduce-scatter(%p), channel_id=3, dimensions={0}, to_apply=%add
}
ENTRY %main {
  %start = ((u8[3,16,32]{2,1,0}, u8[3,4]{1,0}), (u8[3,64,32]{2,1,0}, u8[3,16]{1,0})) \
all-gather-start(%a, %b), \
dimensions={1}, metadata={op_name="jit(step)/gather/all_gather" stack_frame_id=4}
  %done = (u8[3,64,32]{2,1,0}, u8[3,16]{1,0}) all-gather-done(%start)
  %scatter-start = ((bf16[8,64]{1,0}), bf16[2,64]{1,0}) async-start(%c), calls=%wrapped
  %sum = f32[]{:T(256)} all-reduce-start(%d), to_apply=%add
  %move = (s32[4]{0}, s32[4]{0}, u32[], u32[]) collective-permute-start(%e), source_target_pairs={{0,1}}
  %rows = (f8e4m3fn[40,32]{1,0}, u8[40]{0}) custom-call(%f), custom_call_target="octavo_quantize_mxfp8", api_version=4
  ROOT %other = f32[2]{0} custom-call(%g), custom_call_target="cublas"
}
"""


class _Compiled:
    def as_text(self) -> str:
        return GPU_TEXT


def test_asynchronous_ones_count_once_and_by_what_they_make() -> None:
    """A GPU's program starts and ends its collectives apart, several in one, operands among the results."""
    found = {one.kind: one for one in collectives(_Compiled())}
    assert list(found) == ["reduce-scatter", "all-gather", "all-reduce", "collective-permute"]
    assert found["all-gather"].results == (ArrayShape("u8", (3, 64, 32)), ArrayShape("u8", (3, 16)))
    assert found["all-gather"].bytes == 3 * 64 * 32 + 3 * 16
    assert found["all-gather"].named == "jit(step)/gather/all_gather"
    assert found["reduce-scatter"].bytes == 2 * 2 * 64
    assert found["all-reduce"].bytes == 4
    assert found["collective-permute"].results == (ArrayShape("s32", (4,)),)


def test_custom_calls_by_prefix() -> None:
    """Ours alone, unless another prefix is asked for."""
    rows = (ArrayShape("f8e4m3fn", (40, 32)), ArrayShape("u8", (40,)))
    assert custom_calls(_Compiled()) == (CustomCall("octavo_quantize_mxfp8", rows),)
    assert [call.target for call in custom_calls(_Compiled(), "cublas")] == ["cublas"]


def test_a_program_of_this_machine(mesh_of: Any) -> None:
    """What XLA prints here is understood: one gather, of a byte an element and the whole on each device; a GPU may have
    its dimensions in another order."""

    def gather(x: Any) -> Any:
        return lax.all_gather(x, "fsdp", axis=1, tiled=True)

    mesh = mesh_of(ep=2, fsdp=4)
    whole_bytes = 6 // mesh.shape["ep"] * 64 * 32
    whole = jax.shard_map(gather, mesh=mesh, in_specs=P("ep", "fsdp"), out_specs=P("ep"), check_vma=False)
    (found,) = collectives(jax.jit(whole).lower(jnp.zeros((6, 64, 32), jnp.uint8)).compile())
    assert (found.kind, [one.dtype for one in found.results], found.bytes) == ("all-gather", ["u8"], whole_bytes)
    assert found.named.endswith("all_gather")
