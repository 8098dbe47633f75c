"""A probe: an operation that computes nothing and finds out, when XLA partitions the program, how arrays are placed.

Under `jax.jit` on Auto meshes the placement of an array is not known until XLA has partitioned the program. So the
program has a custom call for each array that a layer reads. XLA's partitioner asks this module how to shard that call,
and passes the placement of its operand along; the call itself is left out of the compiled program. Its text is the same
in every process and holds no address, so that the persistent compilation cache serves the program. A program that
comes from the cache is not partitioned again, and nothing is reported of it.

There are no probes on one device, where the caller is manual over all axes, in a program for `jax.export`, and on
platforms other than CPUs and GPUs.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from jax import Array
from jax._src import mesh as old_meshes  # the old `with mesh:` leaves its mesh nowhere else
from jax._src import xla_bridge  # plugins, such as the one of GPUs, take partitioners nowhere else
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo

from octavo_jax.array_moves.moves import Move, WantedPlacement, move_of, report_move
from octavo_jax.array_moves.shares import MeshShape, shares_of_slices, shares_of_tiles

TARGET = "octavo_placement"
PLATFORMS = frozenset({"cpu", "cuda", "rocm", "gpu"})

_ir: Any = mlir.ir


def probed(array: Array, wanted: WantedPlacement) -> Array:
    """`array` with a probe, which reports where it is placed otherwise than wanted.

    Give the result to what computes. A residual for a backward pass should be `array` itself, which `jax.lax.scan`
    need not stack again.
    """
    seen: Array = _probe.bind(array, array, wanted=(wanted,))
    return seen


def probed_beside(result: Array, arrays: tuple[Array, ...], wanted: tuple[WantedPlacement, ...]) -> Array:
    """`result` with a probe of each of `arrays`, which is in every program that uses `result`; differentiable."""
    seen: Array = _probe.bind(result, *arrays, wanted=wanted)
    return seen


_probe: Any = Primitive(TARGET)  # JAX leaves its methods untyped
_probe.def_abstract_eval(lambda passed, *seen, wanted: passed)


def _eagerly(passed: Array, *seen: Array, wanted: tuple[WantedPlacement, ...]) -> Array:
    for array, one in zip(seen, wanted, strict=True):
        move = move_of_array(array, one)
        if move is not None:
            report_move(move, one.policy, one.place)
    return passed


_probe.def_impl(_eagerly)


def _jvp(primals: Any, tangents: Any, *, wanted: tuple[WantedPlacement, ...]) -> Any:
    return _probe.bind(*primals, wanted=wanted), tangents[0]


def _batched(arrays: Any, dims: Any, *, wanted: tuple[WantedPlacement, ...]) -> Any:
    pairs = zip(wanted, dims[1:], strict=True)
    moved = tuple(one.with_axis(dim) if isinstance(dim, int) else one for one, dim in pairs)
    return _probe.bind(*arrays, wanted=moved), dims[0]


ad.primitive_jvps[_probe] = _jvp
batching.primitive_batchers[_probe] = _batched


def move_of_array(array: Any, wanted: WantedPlacement) -> Move | None:
    """What has to move of a concrete array; None where nothing has to, or it is on no mesh yet."""
    if not isinstance(array, Array):  # a constant of a traced program that is run op by op, on no device
        return None
    sharding = array.sharding
    mesh = getattr(sharding, "mesh", None)
    if not array.committed or mesh is None or mesh.empty:
        return None
    here = MeshShape.of(mesh)
    if wanted.mesh is not None and (here.names, here.lengths) != (wanted.mesh.names, wanted.mesh.lengths):
        return None
    slices = sharding.devices_indices_map(array.shape)
    held = shares_of_slices([slices[device] for device in mesh.devices.flat], array.shape)
    return move_of(replace(wanted, mesh=here), array.shape, array.dtype.itemsize, held)


@dataclass
class _Lowered:
    """What the text of a custom call stands for in the program that was lowered last, and the moves reported of it."""

    wanted: WantedPlacement
    reported: set[Move] = field(default_factory=set)


_lowered: OrderedDict[str, _Lowered] = OrderedDict()
_MOST = 4096


def _lower(ctx: Any, passed: Any, *seen: Any, wanted: tuple[WantedPlacement, ...]) -> list[Any]:
    module = ctx.module_context
    devices = _devices(module.axis_context)
    here = PLATFORMS.issuperset(module.platforms) and not module.lowering_parameters.for_export
    for value, aval, one in zip(seen, ctx.avals_in[1:], wanted, strict=True):
        if one.mesh is None and one.entries is not None:
            one = replace(one, mesh=_mesh_of_program(module.axis_context, one))
        if devices > 1 and here and one.policy != "allow":
            _call(value, aval, one)
    return [passed]


mlir.register_lowering(_probe, _lower)


def _devices(context: Any) -> int:
    """The number of devices over which XLA partitions what is lowered here; 1 where the caller is manual over all."""
    if isinstance(context, mlir.SPMDAxisContext):
        return MeshShape.of(context.mesh, frozenset(context.manual_axes)).devices
    return context.num_devices if isinstance(context, mlir.ShardingContext) else 1


def _mesh_of_program(context: Any, wanted: WantedPlacement) -> MeshShape:
    """The mesh of a program that was traced without one."""
    mesh = getattr(context, "abstract_mesh", None) or old_meshes.thread_resources.env.physical_mesh
    if mesh.empty:
        raise ValueError(
            f"{wanted.function} was given sharding and there is no mesh: none is in scope, and no argument of the "
            "program is placed on one; call it under jax.set_mesh(mesh), or leave sharding out on one device"
        )
    return MeshShape.of(mesh)


def _call(value: Any, aval: Any, wanted: WantedPlacement) -> None:
    """Add the custom call for `value`, about which XLA's partitioner will ask."""
    known = {name: part for name, part in vars(wanted).items() if name != "place"}
    text = json.dumps({**known, "shape": aval.shape, "dtype": str(_ir.RankedTensorType(value.type).element_type)})
    _lowered[text] = _Lowered(wanted)
    if len(_lowered) > _MOST:
        _lowered.popitem(last=False)
    stablehlo.CustomCallOp(
        [value.type],
        [value],
        call_target_name=_ir.StringAttr.get(TARGET),
        has_side_effect=_ir.BoolAttr.get(True),  # or it would be gone before the partitioner comes
        api_version=_ir.IntegerAttr.get(_ir.IntegerType.get_signless(32), 2),
        called_computations=_ir.ArrayAttr.get([]),
        backend_config=_ir.StringAttr.get(text),
        operand_layouts=None,
        result_layouts=None,
    )


def _partition(shapes: Any, tiles: Any, _shape: Any, _tiles: Any, text: bytes) -> Any:
    """Called by XLA's partitioner: reports how the operand is placed. The result, the operand itself, is never read."""
    (shape,), (placed,) = shapes, tiles
    known = json.loads(text)
    lowered = _lowered.get(text.decode())
    if lowered is not None and placed.is_tiled():  # what is replicated is everywhere already
        wanted, size = lowered.wanted, shape.numpy_dtype().itemsize
        move = move_of(wanted, shape.dimensions(), size, shares_of_tiles(placed, shape.dimensions()))
        if move is not None and move not in lowered.reported:
            lowered.reported.add(move)
            report_move(move, wanted.policy, wanted.place)
    part = "x".join([*map(str, placed.tile(shape).dimensions()), known["dtype"]])
    same = f"func.func @main(%a: tensor<{part}>) -> tensor<{part}> {{ return %a : tensor<{part}> }}"
    return same.encode(), [placed], placed


def _inferred(_shapes: Any, tiles: Any, _result: Any, _text: bytes) -> Any:
    return tiles[0]


def _unchanged(tiles: Any, _shape: Any, _text: bytes) -> Any:
    return tiles


_PARTITIONER: dict[str, Any] = {
    "name": TARGET,
    "prop_user_sharding": _unchanged,
    "partition": _partition,
    "infer_sharding_from_operands": _inferred,
    "can_side_effecting_have_replicated_sharding": True,
}
xla_client.register_custom_call_partitioner(**_PARTITIONER)
_for_plugins: Any = xla_bridge.register_plugin_callbacks
_for_plugins(functools.partial(xla_client.register_custom_call_partitioner, **_PARTITIONER))
