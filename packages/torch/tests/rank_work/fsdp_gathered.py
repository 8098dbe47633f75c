"""What ranks change of a layer that FSDP2 has gathered: importable by name, because other processes run it."""

from __future__ import annotations

import copy

import torch
from torch.distributed.fsdp import fully_shard

from octavo import BlockScaling
from octavo_torch import GroupedMLP, add_lora, convert, load_experts, merge_lora, quantize_before_gather
from rank_work.fsdp import device, mesh_of

G, K, M = 4, 32, 12
SIZES = [3, 3, 2, 4]


def gathered(*, adapters: bool) -> tuple[GroupedMLP, dict[str, torch.Tensor]]:
    """A sharded MLP that still has what it gathered for a forward, and its weights with their adapters' products."""
    torch.manual_seed(3)  # the same on every rank
    mlp = GroupedMLP(G, K, K, recipe=None, device=device())
    merged = {}
    for adapter in add_lora(mlp, 4) if adapters else ():
        torch.nn.init.normal_(getattr(mlp, adapter).lora_B)
        name = adapter.replace("lora", "weight")
        merged[name] = getattr(mlp, adapter).merged_weight(getattr(mlp, name))
    fully_shard(mlp, mesh=mesh_of())
    with torch.no_grad():
        mlp(torch.randn(M, K, device=device()), SIZES)
    assert not hasattr(mlp.weight1, "full_tensor")
    return mlp, merged


def change_what_was_gathered() -> tuple[list[bool], list[str]]:
    """Whether merging changes the shards, and what adding and loading say."""
    mlp, merged = gathered(adapters=True)
    merge_lora(mlp)
    mlp.reshard()  # type: ignore[operator]
    equal = [torch.equal(getattr(mlp, name).full_tensor(), value) for name, value in merged.items()]
    told = []
    for change in (lambda mlp: add_lora(mlp, 4), lambda mlp: load_experts(mlp, "nowhere")):
        try:
            change(gathered(adapters=False)[0])  # type: ignore[no-untyped-call]
        except ValueError as error:
            told.append(str(error))
    return equal, told


def convert_what_was_gathered() -> tuple[list[bool], str]:
    """Whether a layer whose codes were gathered for a forward has the bits of a recipe with the same codes after
    `convert`, and what is said of one with others."""
    torch.manual_seed(3)
    whole = GroupedMLP(G, K, K, recipe="fp8-block", dtype=torch.bfloat16, device=device())
    mlp = copy.deepcopy(whole)
    quantize_before_gather(mlp)
    fully_shard(mlp, mesh=mesh_of())
    x, equal, told = torch.randn(M, K, dtype=torch.bfloat16, device=device()), [], ""
    for recipe in (BlockScaling(gradient_format="e5m2"), BlockScaling(wgrad="high_precision")):
        with torch.no_grad():
            mlp(x, SIZES)
            convert(whole, recipe)
            convert(mlp, recipe)
            equal.append(torch.equal(mlp(x, SIZES), whole(x, SIZES)))
    try:
        convert(mlp, "mxfp8")
    except ValueError as error:
        told = str(error)
    return equal, told
