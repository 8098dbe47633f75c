"""The block over a mesh: inside the caller's manual region as it is, elsewhere in a `jax.shard_map` of its own."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from octavo.caller import place_of_caller
from octavo_jax.array_moves.probe import probed_beside
from octavo_jax.arrays.varying import varying_axes
from octavo_jax.mlp.arguments import mlp_placements
from octavo_jax.moe import shared_states
from octavo_jax.moe.local_block import BlockArrays, BlockResult, MoeBlock
from octavo_jax.moe.routing import RouterStats
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.scaling.seeds import seed_words
from octavo_jax.sharding.axes import MeshAxes, called_function
from octavo_jax.sharding.explicit_placement import placed, placed_as
from octavo_jax.sharding.manual_sums import differentiated_once
from octavo_jax.sharding.placement import Placement, mesh_of
from octavo_jax.sharding.placement_of_call import wanted_placement
from octavo_jax.sharding.run_on_shards import run_on_shards

_Names = tuple[str, ...]
P: Any = PartitionSpec  # JAX leaves it untyped


def run_over_mesh(block: MoeBlock, a: BlockArrays) -> BlockResult:
    """`block` on each device's part of `a`. The first axis of x is cut along `block.token_axes`, experts along ep,
    the kernels' other axes as by `octavo_jax.grouped_mlp`.

    Raises ValueError where no mesh is in scope, an axis is missing, or a length does not divide.
    """
    assert block.sharding is not None
    placement = Placement(block.sharding, mesh_of(a), ())
    if placement.route == "manual":
        return block.run(a)
    _check_axes(placement)
    tokens = placement.non_manual(block.token_axes)
    experts = placement.non_manual(block.sharding.names("ep"))
    sharing = tuple(name for name in placement.non_manual_axes if name not in experts)
    idle = tuple(
        name
        for name in placement.non_manual_axes
        if name not in block.sharding.every and placement.shard_count((name,)) > 1
    )
    specs = _specs(block, placement, a, tokens, experts, sharing)
    _check_lengths(placement, a, specs)
    a, given_state = _placed(a, specs, placement), a.state
    if a.seed is not None:
        a = a._replace(seed=seed_words(a.seed))
    if a.state is not None:
        a = a._replace(state=shared_states.copied(a.state, placement.shard_count(sharing), placement.mesh, specs.state))

    def local(a: BlockArrays) -> BlockResult:
        result = block.run(a._replace(state=shared_states.local_copy(a.state)))
        y, stats = differentiated_once((result.y, result.stats), idle)
        return BlockResult(y, stats, shared_states.with_copy_axis(result.state))

    dropped = None if block.exchange.rows is None or not block.sharding.ep else P()
    # Inside, what is the same on all devices is known by the specs: the statistics are sums over all axes of tokens.
    result = run_on_shards(
        placement, local, (a,), (specs,), BlockResult(P(tokens), RouterStats(P(), P(), dropped), specs.state)
    )
    y = _probed_beside(result.y, a, specs, placement)
    state = placed_as(given_state, shared_states.largest_of_copies(result.state, placement.mesh, specs.state))
    return _not_differentiated_nested(BlockResult(y, result.stats, state), a, placement)


def _not_differentiated_nested(result: BlockResult, a: BlockArrays, placement: Placement) -> BlockResult:
    """`result`; TypeError for its derivative inside a caller's shard_map that cuts `a` and checks types.

    JAX finds no types for the derivative of one shard_map without such checks inside one with them, nor places for the
    residuals of one with them (jax 0.10.2).
    """
    if not varying_axes(a):
        return result
    y, stats = undifferentiated(
        (result.y, result.stats),
        f"moe_mlp was differentiated inside a jax.shard_map that is manual over {sorted(placement.manual_axes)} and "
        f"not over {sorted(placement.non_manual_axes)}, with check_vma=True; make it manual over all axes of the mesh, "
        "or give it check_vma=False and differentiate outside of it",
    )
    return result._replace(y=y, stats=stats)


def _probed_beside(y: Any, a: BlockArrays, specs: BlockArrays, placement: Placement) -> Any:
    """y with probes of the block's arguments: probed themselves, these would become residuals of their own."""
    called, place = called_function("moe_mlp", placement.axes), place_of_caller()
    pairs = [
        (one, wanted)
        for name, one, spec in _by_name(a, specs)
        if (wanted := wanted_placement(called, placement, name, one, spec, place)) is not None
    ]
    return probed_beside(y, tuple(one for one, _ in pairs), tuple(wanted for _, wanted in pairs)) if pairs else y


def manual_expert_shards(sharding: MeshAxes | None) -> int:
    """How many shards of the experts the caller has made: the devices along those axes of ep that it is manual over."""
    if sharding is None:
        return 1
    placement = Placement(sharding, mesh_of(), ())
    return placement.shard_count(tuple(name for name in sharding.names("ep") if name in placement.manual_axes))


def _specs(
    block: MoeBlock, placement: Placement, a: BlockArrays, tokens: _Names, experts: _Names, sharing: _Names
) -> BlockArrays:
    """PartitionSpecs of the arrays that are there; `sharing`: axes whose devices have the same experts."""
    fc1, fc2 = mlp_placements(placement, block.activation)
    assert fc1 is not None
    assert fc2 is not None

    def kernel(one: Placement) -> Any:
        groups, k, n = (one.non_manual(one.axes_of(letter)) for letter in ("g", "k", "n"))
        return P(experts + groups, k, n)

    specs = BlockArrays(
        x=P(tokens),
        mask=P(tokens),
        router=P(),
        wi=kernel(fc1),
        wo=kernel(fc2),
        bi=P(experts, fc1.non_manual(block.sharding.names("tp") if block.sharding else ())),
        bo=P(experts),
        seed=P(),
        state=None if a.state is None else shared_states.copy_specs(a.state, sharing, experts),
        choice_bias=P(),
        replay=P(tokens),
    )
    arrays: dict[str, Any] = a._asdict()
    absent: dict[str, Any] = {name: None for name, one in arrays.items() if one is None}
    return specs._replace(**absent)


def _check_axes(placement: Placement) -> None:
    mesh, axes = placement.mesh, placement.axes
    if mesh is None:
        raise ValueError(
            f"sharding is {axes!r} and no mesh is in scope; call the block under jax.set_mesh(mesh), or inside "
            "jax.shard_map over these axes"
        )
    missing = [name for name in axes.every if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"sharding names the axis {missing[0]!r} and the mesh has {list(mesh.axis_names)}; give one of these"
        )


def _check_lengths(placement: Placement, a: BlockArrays, specs: BlockArrays) -> None:
    for name, array, spec in _by_name(a, specs):
        for axis, entry in enumerate(spec):
            names = (entry,) if isinstance(entry, str) else entry or ()
            shards = placement.shard_count(names)
            if shards > 1 and (array.ndim < len(spec) + (name == "x") or array.shape[axis] % shards):
                raise ValueError(
                    f"{name} has shape {list(array.shape)} and the mesh axes {list(names)} cut its axis {axis} into "
                    f"{shards}; give a multiple of {shards}"
                )


def _placed(a: BlockArrays, specs: BlockArrays, placement: Placement) -> BlockArrays:
    """`a` as Explicit axes of a mesh want it; see `octavo_jax.sharding.explicit_placement`."""
    placed_arrays: dict[str, Any] = {
        name: placed(placement.mesh, name, array, spec, tokens=name == "x") for name, array, spec in _by_name(a, specs)
    }
    return a._replace(**placed_arrays)


def _by_name(a: BlockArrays, specs: BlockArrays) -> list[tuple[str, Any, Any]]:
    """Name, array and PartitionSpec of the plain arrays that are there."""
    triples = zip(a._fields, a, specs, strict=True)
    return [(name, one, spec) for name, one, spec in triples if one is not None and name not in ("seed", "state")]
