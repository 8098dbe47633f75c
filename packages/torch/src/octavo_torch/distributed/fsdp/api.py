"""FSDP2 over grouped layers: weights that are quantized by shards and gathered as codes, and what was gathered how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.checks import check_module
from octavo_torch.distributed.fsdp.gather_state import Notes
from octavo_torch.distributed.fsdp.shard import WeightShard
from octavo_torch.scaling.recipe_module import RecipeModule

_NOTES = "_gather_notes"


def quantize_before_gather(module: nn.Module) -> None:
    """Let FSDP2 gather the weights of every GroupedLinear and GroupedMLP in `module` as codes; call it before
    fully_shard.

    Each rank quantizes its shard, and the codes that the ranks gather are bit for bit those of the whole weight, for
    shards along dims 0, 1 and 2. Where a recipe's scales do not allow that (a block would be cut, a GEMM reads values,
    shards are not equal) the values are gathered and quantized as without this call; `explain_gather` says so. The
    sharded parameters keep their values, dtype and place in optimizers and state dicts.

    Raises ValueError for a module without such weights, or one that is sharded already.
    """
    check_module(module)
    found = [*_weights(module)]
    if not found:
        raise ValueError(
            f"module is a {type(module).__name__} without a GroupedLinear or GroupedMLP that has its weights in one "
            "parameter; give a module that has some"
        )
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            f"module is a {type(module).__name__} in which fully_shard was called; call quantize_before_gather first"
        )
    for name, owner, number in found:
        weight = owner._parameters[name]
        assert weight is not None
        if not isinstance(_local(weight), WeightShard):
            notes = Notes(name, number)
            owner._parameters[name] = nn.Parameter(_marked(weight.detach(), notes), weight.requires_grad)
            # the parameter itself is another one while it is gathered
            owner.__dict__.setdefault(_NOTES, {})[name] = notes


@contextmanager
def unchanged_weights(module: nn.Module) -> Iterator[None]:
    """A block in which no weight of `module` changes, such as a step's microbatches: each shard is quantized at its
    first gather in it, and its codes serve the later ones.

        with octavo_torch.unchanged_weights(model):
            for x in microbatches:
                model(x).backward()
        optimizer.step()

    Bits are the same. The codes of a rank's shards take a byte a value, two where a recipe has both planes, until the
    block ends. All ranks enter and leave it at the same places, because amax is reduced at the first gather alone.
    Raises ValueError for a module whose weights `quantize_before_gather` has not marked, and in a gather after a weight
    has been written.
    """
    check_module(module)
    marked = [notes for owner in module.modules() for notes in owner.__dict__.get(_NOTES, {}).values()]
    if not marked:
        raise ValueError(
            f"module is a {type(module).__name__} without weights that are gathered as codes; call "
            "quantize_before_gather first"
        )
    before = [notes.keeps for notes in marked]
    try:
        for notes in marked:
            notes.keep(True)
        yield
    finally:
        for notes, keeps in zip(marked, before, strict=True):
            notes.keep(keeps)


def explain_gather(module: nn.Module) -> str:
    """A line for each weight of a grouped layer in `module`: how FSDP2 gathered it last."""
    check_module(module)
    lines = []
    for prefix, owner in module.named_modules():
        for name, _, _ in _own_weights(owner):
            notes = owner.__dict__.get(_NOTES, {}).get(name)
            said = "gathered unquantized: quantize_before_gather was not called"
            if notes is not None:
                said = "not gathered yet" if notes.route is None else str(notes.route)
            lines.append(f"{prefix}{'.' * bool(prefix)}{name}: {said}")
        if isinstance(owner, RecipeModule) and owner.per_group_parameters:
            parted = [name for name in owner._shapes if name.startswith("weight")]
            said = "gathered unquantized: it is a parameter a group"
            lines += [f"{prefix}{'.' * bool(prefix)}{name}: {said}" for name in parted]
    return "\n".join(lines)


def _weights(module: nn.Module) -> Iterator[tuple[str, RecipeModule, int]]:
    for owner in module.modules():
        yield from _own_weights(owner)


def _own_weights(owner: nn.Module) -> Iterator[tuple[str, RecipeModule, int]]:
    """Parameters [G, N, K] of a grouped layer, with the number of the layer in its module."""
    if isinstance(owner, RecipeModule):
        for number, names in enumerate((("weight", "weight1"), ("weight2",))):
            for name in names:
                weight = owner._parameters.get(name)
                if weight is not None and weight.dim() == 3:
                    yield name, owner, number


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _marked(weight: Tensor, notes: Notes) -> Tensor:
    """`weight` over a WeightShard; with tensor parallelism that is the local tensor of a DTensor."""
    if not isinstance(weight, DTensor):
        return WeightShard(weight, notes)
    shard = WeightShard(weight.to_local(), notes)
    return DTensor.from_local(
        shard, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
