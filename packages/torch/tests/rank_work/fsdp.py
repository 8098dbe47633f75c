"""What ranks do in the tests of FSDP2: importable by name, because other processes run it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_torch import (
    GroupedLinear,
    GroupedMLP,
    Linear,
    explain_gather,
    quantize_before_gather,
    unchanged_weights,
    update_scales,
)
from octavo_torch.distributed.fsdp import shard
from octavo_torch.linear.coded_weight import CodedWeight

G, N, K, M = 4, 512, 512, 40
SIZES = [11, 0, 17, 6]
RECIPES: dict[str, Recipe] = {
    **{name: PRESETS[name] for name in ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")},
    "fp8-delayed": DelayedScaling(history=3),
    "mxfp8-square": MXFP8(square_weights=True),
    "bf16 backward": BlockScaling(dgrad="high_precision", wgrad="high_precision"),
}


def device() -> torch.device:
    """This process' own."""
    return torch.device(ranks.device)


def sizes_of(sizes: list[int]) -> Tensor:
    """Where a rank with a GPU has them: on it."""
    return torch.tensor(sizes, device=device())


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(device().type, shape or (dist.get_world_size(),), mesh_dim_names=names)


def data(seed: int, rows: int = M, columns: int = K) -> Tensor:
    drawn = torch.randn(rows, columns, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device())


def layer_of(recipe: Recipe, groups: int = G, n: int = N, k: int = K, backend: str | None = None) -> GroupedLinear:
    torch.manual_seed(1)
    layer = GroupedLinear(groups, k, n, bias=True, recipe=recipe, backend=backend, dtype=torch.bfloat16, seed=3)
    return layer.to(device())


def sharded(layer: Any, dim: int, **options: Any) -> Any:
    """FSDP2 over `layer`, gathered for forward and again for backward, which FSDP2 does not do for a root by itself."""
    quantize_before_gather(layer)
    place = {3: Shard(dim), 2: Shard(min(dim, 1))}
    options = {"reshard_after_forward": True, **options}
    return fully_shard(layer, mesh=mesh_of(), shard_placement_fn=lambda p: place[p.dim()], **options)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def steps(layer: Any, forward: Any, count: int = 2) -> list[Tensor]:
    """y, dx, the clipped gradient's norm and the parameters of some steps; whole tensors, on every rank."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    for step in range(count):
        x = data(step).requires_grad_()
        y = forward(x)
        y.backward(data(step + 50, columns=y.shape[1]))
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
        assert x.grad is not None
        seen += [y.detach(), x.grad, whole(norm)]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(layer)
    return seen + [whole(parameter).detach() for parameter in layer.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> list[bool]:
    return [torch.equal(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True)]


def norms_aside(seen: list[Tensor], count: int = 2) -> list[Tensor]:
    """A norm is summed in another order by shards."""
    return [value for index, value in enumerate(seen) if index % 3 != 2 or index >= 3 * count]


def train_all_dims(name: str) -> list[Any]:
    found = []
    for dim in (0, 1, 2):
        plain, layer = layer_of(RECIPES[name]), layer_of(RECIPES[name])
        expected = steps(plain, lambda x, plain=plain: plain(x, sizes_of(SIZES)))
        sharded(layer, dim)
        kinds = set()
        layer.register_forward_pre_hook(lambda module, _, kinds=kinds: kinds.add(type(module.weight) is CodedWeight))
        seen = steps(layer, lambda x, layer=layer: layer(x, sizes_of(SIZES)))
        norm = [abs(a - b) / b for a, b in zip(seen[2:6:3], expected[2:6:3], strict=True)]
        found.append(
            (same(norms_aside(seen), norms_aside(expected)), max(map(float, norm)), kinds, explain_gather(layer))
        )
    return found


def train_ways() -> dict[str, list[bool]]:
    recipe, found = BlockScaling(), {}
    expected = steps(*(lambda one: (one, lambda x: one(x, sizes_of(SIZES))))(layer_of(recipe)))

    def compare(name: str, layer: Any, forward: Any) -> None:
        found[name] = same(norms_aside(steps(layer, forward)), norms_aside(expected))

    layer = sharded(layer_of(recipe), 0, reshard_after_forward=False)
    compare("kept gathered", layer, lambda x: layer(x, sizes_of(SIZES)))
    for reentrant in (True, False):
        one = sharded(layer_of(recipe), 1)
        name = f"checkpointed, {'' if reentrant else 'non-'}reentrant"
        compare(name, one, lambda x, one=one, way=reentrant: checkpoint(one, x, sizes_of(SIZES), use_reentrant=way))
    offloaded = sharded(layer_of(recipe), 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    compare("offloaded", offloaded, lambda x: offloaded(x, sizes_of(SIZES)))
    if device().type == "cuda":
        del found["offloaded"][2:]  # the CPU's optimizer rounds otherwise
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mixed = sharded(layer_of(recipe).float(), 1, mp_policy=policy)
    y = mixed(data(0), sizes_of(SIZES))
    found["fp32 shards, bf16 codes"] = [torch.equal(y, layer_of(recipe)(data(0), sizes_of(SIZES)))]
    return found


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer_of(BlockScaling()), layer_of(BlockScaling())
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        sizes = sizes_of(SIZES)
        return self.second(self.first(x, sizes), sizes)


def train_tied() -> list[bool]:
    """The weight's gradient is the sum of both layers'."""
    plain, shards = Tied(), sharded(Tied(), 0)
    return same(norms_aside(steps(shards, shards)), norms_aside(steps(plain, plain)))


def held_by(saved: list[Tensor]) -> int:
    """Bytes of what autograd has saved; the memory of a wrapper is that of what is in it."""
    planes = [plane for t in saved for plane in (pytree.tree_leaves(t.codes) if type(t) is CodedWeight else [t])]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in planes}.values())


def train_compiled() -> list[Any]:
    """Steps of layers whose forward is compiled before they are sharded, or after: bits, graphs, bytes that are held
    between forward and backward, what was gathered.

    By the first rank alone: compiling takes seconds, and collectives are the same. The reference serves, whose layout
    has no padding, so that bytes can be counted.
    """
    found, reference = [], "torch-reference"
    for name, dim, first in (("mxfp8-square", 1, True), ("fp8-delayed", 0, False)):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        plain, layer = (layer_of(RECIPES[name], backend=reference) for _ in range(2))
        expected = steps(plain, lambda x, plain=plain: plain(x, sizes_of(SIZES)))
        for turn in (first, not first):
            if not turn:
                sharded(layer, dim)
            elif not dist.get_rank():
                layer.compile(fullgraph=True, backend="aot_eager")
        held: list[int] = []

        def forward(x: Tensor, layer: Any = layer, held: list[int] = held) -> Tensor:
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
                y: Tensor = layer(x, sizes_of(SIZES))
            held.append(held_by(saved))
            return y

        seen = steps(layer, forward)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((same(norms_aside(seen), norms_aside(expected)), graphs, held, explain_gather(layer)))
    torch.compiler.reset()
    return found


def accumulate_with_an_empty_rank() -> list[bool]:
    """Two microbatches; rank 1 has no tokens. Small integers, whose sums are exact in any order."""
    rank, rows = dist.get_rank(), 10
    layer, plain = sharded(layer_of(BlockScaling()), 1), layer_of(BlockScaling())
    for micro in range(2):
        layer.set_requires_gradient_sync(micro == 1)
        for of in range(dist.get_world_size()):
            signs = torch.Generator().manual_seed(10 * micro + of)
            x, dy = (torch.randint(-1, 2, (rows, side), generator=signs).bfloat16().to(device()) for side in (K, N))
            sizes = sizes_of([0, 0, 0, 0] if of == 1 else [3, 0, 5, 2])
            if of == rank:
                layer(x, sizes).backward(dy)
            plain(x, sizes).backward(dy)
    pairs = zip(layer.parameters(), plain.parameters(), strict=True)
    return [torch.equal(a.grad.full_tensor(), b.grad / dist.get_world_size()) for a, b in pairs]  # type: ignore[union-attr, operator]


def codes_of_a_step() -> list[Any]:
    """Steps of two microbatches with unchanged_weights and without: bits, quantized shards; a write in the block."""
    found: list[Any] = []
    for name, dim in (("fp8-current", 1), ("nvfp4", 2), ("fp8-delayed", 0)):
        made, counts = [], []
        for block in (nullcontext, unchanged_weights):
            layer = sharded(layer_of(RECIPES[name]), dim)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            seen: list[Tensor] = []
            with mock.patch.object(shard, "quantize_shard", wraps=shard.quantize_shard) as quantized:
                for step in range(2):
                    with block(layer) if block is unchanged_weights else block():
                        for micro in range(2):
                            y = layer(data(2 * step + micro), sizes_of(SIZES))
                            y.backward(data(9 * step + micro))
                            seen.append(y.detach())
                    seen += [whole(parameter.grad).clone() for parameter in layer.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()
                    update_scales(layer)
            counts.append(quantized.call_count)
            made.append([*seen, *layer.buffers()])
        found.append((same(*made), counts))
    told = ""
    with unchanged_weights(layer):
        layer(data(0), sizes_of(SIZES)).backward(data(1))
        optimizer.step()
        try:
            layer(data(0), sizes_of(SIZES))
        except ValueError as error:
            told = str(error)
    return [found, told]


def mlp_and_uneven() -> list[Any]:
    torch.manual_seed(2)
    mlps = [
        GroupedMLP(5, 64, 128, recipe=PRESETS["mxfp8"], dtype=torch.bfloat16, seed=3).to(device()) for _ in range(2)
    ]
    mlps[1].load_state_dict(mlps[0].state_dict())
    sharded(mlps[1], 0)
    outs = [mlp(data(0, columns=64), sizes_of([8, 8, 0, 8, 8])) for mlp in mlps]
    first = explain_gather(mlps[1])
    mlp = GroupedMLP(4, 64, 128, recipe=PRESETS["nvfp4"], dtype=torch.bfloat16, seed=3).to(device())
    twin = GroupedMLP(4, 64, 128, recipe=PRESETS["nvfp4"], dtype=torch.bfloat16, seed=3).to(device())
    twin.load_state_dict(mlp.state_dict())
    sharded(twin, 0)
    pairs = []
    for one in (mlp, twin):
        x = data(1, columns=64).requires_grad_()
        y = one(x, sizes_of(SIZES))
        y.backward(data(2, columns=64))
        pairs.append((y.detach(), x.grad))
    equal = [torch.equal(a, b) for a, b in zip(*pairs, strict=True)]
    refused = ""
    try:
        quantize_before_gather(twin)
    except ValueError as error:
        refused = str(error)
    return [torch.equal(*outs), first, equal, explain_gather(twin), refused]


def poison(dim: int) -> tuple[bool, bool]:
    layer = layer_of(PRESETS["fp8-current"])
    with torch.no_grad():
        layer.weight[2, 500, 3] = torch.nan
        sharded(layer, dim)
        y = layer(data(0), sizes_of(SIZES))
    return bool(y[11:28].isnan().all()), bool(y[:11].isfinite().all())


def linear_layers() -> tuple[list[bool], str, str]:
    """A Linear in shards beside one process, what explain_gather says, and what tensor parallelism is told."""
    made = []
    for _ in range(3):
        torch.manual_seed(1)
        made.append(Linear(K, N, recipe=DelayedScaling(history=3), dtype=torch.bfloat16).to(device()))
    plain, layer, split = made
    expected = steps(plain, plain)
    fully_shard(layer, mesh=mesh_of(), reshard_after_forward=True)
    equal = same(norms_aside(steps(layer, layer)), norms_aside(expected))
    parallelize_module(split, mesh_of(), ColwiseParallel())
    try:
        split(data(0))
    except ValueError as error:
        return equal, explain_gather(layer), str(error)
    raise AssertionError
