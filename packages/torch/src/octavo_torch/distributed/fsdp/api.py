"""FSDP2 over grouped layers: quantize weights in shards, gather them as codes, and explain what was gathered how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo import Recipe
from octavo_torch.arrays.checks import check_module
from octavo_torch.arrays.selection import name_in
from octavo_torch.dense.module import Linear
from octavo_torch.distributed.fsdp.gather_state import GatherState
from octavo_torch.distributed.fsdp.route import route_of
from octavo_torch.distributed.fsdp.shard import WeightShard
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.scaling.recipe_module import RecipeModule

_STATES = "_gather_states"


def quantize_before_gather(module: nn.Module) -> None:
    """Let FSDP2 gather the weights of every GroupedLinear and GroupedMLP in `module` as codes.

    Call it before fully_shard. Each rank quantizes its shard, and the codes that the ranks gather are bit for bit those
    of the whole weight, for shards along dims 0, 1 and 2. Where that is impossible (a block would be cut, a GEMM reads
    values, shards are not equal) the values are gathered and quantized as without this call; `explain_gather` tells
    why. A Linear's weight is gathered as values. The sharded parameters keep their values, dtype and place in
    optimizers and state dicts.

    Raises ValueError for a module without such weights, or one that is sharded already.
    """
    check_module(module)
    weights = [*_weights(module)]
    if not weights:
        raise ValueError(
            f"module is a {type(module).__name__} without a GroupedLinear or GroupedMLP that has its weights in one "
            "parameter; give a module that contains one"
        )
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            f"module is a {type(module).__name__} in which fully_shard was called; call quantize_before_gather first"
        )
    for name, owner, _ in weights:
        if isinstance(owner._parameters[name], CodedWeight):
            raise ValueError(
                f"{name} is codes alone, and FSDP2 shards values, which it gathers as codes; create the module outside "
                "of quantized_parameters"
            )
    tied: dict[Tensor, tuple[nn.Parameter, GatherState]] = {}
    for name, owner, number in weights:
        weight = owner._parameters[name]
        assert weight is not None
        if not isinstance(_local(weight), WeightShard):
            if weight not in tied:
                state = GatherState(name, number)
                tied[weight] = nn.Parameter(_marked(weight.detach(), state), weight.requires_grad), state
            owner._parameters[name], state = tied[weight]
            # not on the parameter: FSDP2 replaces that while it is gathered
            owner.__dict__.setdefault(_STATES, {})[name] = state


@contextmanager
def unchanged_weights(module: nn.Module) -> Iterator[None]:
    """A block in which no weight of `module` changes, such as the microbatches of a step.

    Each shard is quantized at its first gather in the block, and later gathers reuse its codes:

        with octavo_torch.unchanged_weights(model):
            for x in microbatches:
                model(x).backward()
        optimizer.step()

    Bits are the same. Until the block ends, the codes of a rank's shards take one byte per value, or two where a recipe
    has both planes. All ranks must enter and leave it at the same points, because amax is reduced at the first gather
    only.
    Raises ValueError for a module whose weights `quantize_before_gather` has not marked, and in a gather after a weight
    has been written.
    """
    check_module(module)
    states: list[GatherState] = [
        state for owner in module.modules() for state in owner.__dict__.get(_STATES, {}).values()
    ]
    if not states:
        raise ValueError(
            f"module is a {type(module).__name__} without weights that are gathered as codes; call "
            "quantize_before_gather first"
        )
    before = [state.reuses_codes for state in states]
    try:
        for state in states:
            state.reuse_codes(True)
        yield
    finally:
        for state, reuses in zip(states, before, strict=True):
            state.reuse_codes(reuses)


def explain_gather(module: nn.Module) -> str:
    """One line per weight of a grouped layer in `module`: how FSDP2 gathered it last."""
    check_module(module)
    lines = []
    for prefix, owner in module.named_modules():
        for name, _, _ in _own_weights(owner):
            state = owner.__dict__.get(_STATES, {}).get(name)
            how = "gathered unquantized: quantize_before_gather was not called"
            if state is not None:
                how = "not gathered yet" if state.route is None else str(state.route)
            lines.append(f"{name_in(prefix, name)}: {how}")
        if isinstance(owner, RecipeModule):
            weights = [name for name in owner._shapes if name.startswith("weight") and owner.is_per_group(name)]
            what = "is one matrix" if isinstance(owner, Linear) else "has one parameter per group"
            how = f"gathered unquantized: it {what}"
            lines += [f"{name_in(prefix, name)}: {how}" for name in weights]
    return "\n".join(lines)


def check_gathered(name: str, module: nn.Module, recipe: Recipe) -> None:
    """ValueError where FSDP2 has gathered a weight of `module` and would have to gather it in another form in `recipe`:
    torch keeps the arrays of a weight's first gather.

    name   of the module in the model, for the message
    """
    for parameter, _, number in _own_weights(module):
        state: GatherState | None = module.__dict__.get(_STATES, {}).get(parameter)
        weight: Tensor | None = module._parameters[parameter]
        if state is None or state.route is None or not isinstance(weight, DTensor):
            continue
        dim, ranks = state.route.dim, weight.device_mesh.size()
        interleaved = number == 0 and getattr(module, "interleave", None) is not None
        spec = None if interleaved else route_of(recipe, tuple(weight.shape), dim, ranks).spec
        if spec != state.route.spec:
            before, after = (
                "values" if each is None else f"codes of {each.scaling}" for each in (state.route.spec, spec)
            )
            raise ValueError(
                f"FSDP2 has gathered {name_in(name, parameter)} as {before} and would gather it as {after} with recipe "
                f"{recipe.kind}, but torch keeps the arrays of the first gather; convert the model before its first "
                "forward, or create it anew and load its state dict"
            )


def _weights(module: nn.Module) -> Iterator[tuple[str, RecipeModule, int]]:
    for owner in module.modules():
        yield from _own_weights(owner)


def _own_weights(owner: nn.Module) -> Iterator[tuple[str, RecipeModule, int]]:
    """Names of the parameters [G, N, K] of a module, the module, and the number of the layer in it."""
    if isinstance(owner, RecipeModule):
        for number, names in enumerate((("weight", "weight1"), ("weight2",))):
            for name in names:
                weight = owner._parameters.get(name)
                if weight is not None and weight.dim() == 3:
                    yield name, owner, number


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _marked(weight: Tensor, state: GatherState) -> Tensor:
    """`weight` as a WeightShard; with tensor parallelism as a DTensor whose local tensor is one."""
    if not isinstance(weight, DTensor):
        return WeightShard(weight, state)
    shard = WeightShard(weight.to_local(), state)
    return DTensor.from_local(
        shard, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
