"""PackedWeight: MXFP4 experts that stay four bits an element, with the bits of codes that are expanded once."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8
from octavo_torch import (
    GroupedLinear,
    GroupedMLP,
    MoE,
    PackedWeight,
    add_lora,
    expert_tensors,
    export_experts,
    grouped_linear,
    load_experts,
    merge_lora,
    save_checkpoint,
    save_distributed,
)
from octavo_torch.mlp import packed_weight

REFERENCE = "torch-reference"
G, K, F, M = 3, 128, 128, 24
SIZES = [7, 0, 12]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KINDS: dict[str, Any] = {
    "GroupedMLP": lambda **more: GroupedMLP(
        G, K, F, activation="clamped_swiglu", interleave=1, bias=True, dtype=torch.bfloat16, backend=REFERENCE, **more
    ),
    "MoE": lambda **more: MoE(G, K, F, 2, dtype=torch.bfloat16, backend=REFERENCE, **more),
}


def fill(module: nn.Module) -> None:
    """MXFP4's values in both weights, in up to seven binades."""
    for weight in (module.weight1, module.weight2):
        drawn = E2M1[torch.randint(8, weight.shape)] * torch.randn(weight.shape).sign()
        scale = torch.exp2(torch.randint(-7, -4, (*weight.shape[:2], weight.shape[2] // 32)).float())
        weight.data.copy_(drawn * scale.repeat_interleave(32, 2))


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, rng: np.random.Generator, tmp_path: Path) -> tuple[Any, Any, Path, Any]:
    """A module of values that MXFP4 holds, a function of what a packed one needs, its file, and its kind."""
    kind = KINDS[request.param]

    def made(recipe: Any, weights: str) -> Any:
        torch.manual_seed(5)
        module = kind(recipe=recipe)
        fill(module)
        layout = "gpt-oss-mxfp4" if request.param == "GroupedMLP" else "compressed-tensors-mxfp4"
        folder = tmp_path / f"{weights}-{request.param}-{recipe}"
        source = kind(recipe="fp8-block")
        source.load_state_dict(module.state_dict())
        export_experts(nn.ModuleDict({"experts": source}), folder, layout)
        assert load_experts(nn.ModuleDict({"experts": module}), folder, weights=weights) == {}  # type: ignore[arg-type]
        return module

    return made, request.param, tmp_path, kind


def passed(module: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = module(x) if isinstance(module, MoE) else module(x, SIZES)
    own = [p for n, p in module.named_parameters() if "lora_" in n]
    return [y, *torch.autograd.grad(y, [x, *own], dy)]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(M, K).bfloat16()


def test_every_byte(rng: np.random.Generator) -> None:
    """Each byte is two values, the low nibble's first, times a power of two; exactly, down to the least scale."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(1, 1, 2)
    scales = torch.randint(0, 251, (1, 16, 2), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 250])
    weight = PackedWeight(bytes_, scales, MXFP8(), torch.float32)
    table = torch.cat([E2M1, -E2M1]).double()
    codes = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).long()
    wanted = table[codes] * torch.exp2(scales.double() - 127).repeat_interleave(32, 2)
    assert weight.shape == (1, 16, 64)
    assert torch.equal(weight.dequantize().double(), wanted)
    narrow = PackedWeight(bytes_, scales.clamp(8), MXFP8(), torch.bfloat16)
    assert torch.equal(
        narrow.dequantize().double(), table[codes] * torch.exp2(scales.clamp(8).double() - 127).repeat_interleave(32, 2)
    )


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", None])
def test_bits_are_those_of_weights_that_are_expanded_once(recipe: Any, pair: Any, rng: np.random.Generator) -> None:
    """y, x's gradient and every adapter's, as with codes of the recipe or, in high precision, with values."""
    made, *_ = pair
    packed, other = made(recipe, "packed"), made(recipe, "codes" if recipe else "values")
    assert isinstance(packed.weight1, PackedWeight)
    assert not packed.weight1.requires_grad
    assert packed.weight1.blocks.nbytes == packed.weight1.numel() // 2
    assert packed.weight1.scales.nbytes == packed.weight1.numel() // 32
    x, dy = inputs()
    other.requires_grad_(False)
    assert all(map(torch.equal, passed(packed, x, dy), passed(other, x, dy)))
    for module in (packed, other):
        add_lora(module, 8, alpha=16)
    own = [p for n, p in packed.named_parameters() if "lora_" in n]
    for ours, theirs in zip(own, (p for n, p in other.named_parameters() if "lora_" in n), strict=True):
        nn.init.normal_(ours, std=0.2)
        theirs.data.copy_(ours)
    wanted = passed(other, x, dy)
    assert all(map(torch.equal, passed(packed, x, dy), wanted))
    assert all(bool(grad.any()) for grad in wanted[1:])
    with pytest.raises(ValueError, match="weight1 is codes alone"):
        merge_lora(packed)
    values = packed.weight1.dequantize().double() + packed.lora1.delta_weight().double()
    assert torch.equal(packed.lora1.merged_weight(packed.weight1), values.float().bfloat16())


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", None])
def test_nothing_expanded_is_kept(
    recipe: Any, pair: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between forward and backward no tensor of a weight's size lives, and each weight is expanded once each way; with
    activation checkpointing once more."""
    made, *_ = pair
    module = made(recipe, "packed")
    x, dy = inputs()
    expansions: list[torch.Size] = []
    expand = PackedWeight.expand_codes

    def counted(self: PackedWeight, *given: Any, **named: Any) -> Any:
        expansions.append(self.shape)
        return expand(self, *given, **named)

    monkeypatch.setattr(PackedWeight, "expand_codes", counted)
    kept: list[packed_weight._Again] = []
    start = packed_weight._Again.__init__

    def remembered(self: packed_weight._Again, *given: Any) -> None:
        start(self, *given)
        kept.append(self)

    monkeypatch.setattr(packed_weight._Again, "__init__", remembered)
    sizes = () if isinstance(module, MoE) else (SIZES,)
    y = module(x, *sizes)
    assert [again.kept > 0 for again in kept] == [True, True]
    assert not any(again.tensors for again in kept)
    (first,) = torch.autograd.grad(y, x, dy)
    assert len(expansions) == 4
    assert not any(again.tensors for again in kept)
    expansions.clear()
    y = checkpoint(module, x, *sizes, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], first)
    assert len(expansions) in (5, 6)  # torch ends a recomputation where nothing that is kept follows


def test_a_retained_graph_runs_twice(pair: Any, rng: np.random.Generator) -> None:
    """A second backward expands again."""
    made, *_ = pair
    module = made("fp8-block", "packed")
    x, dy = inputs()
    y = module(x) if isinstance(module, MoE) else module(x, SIZES)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], first)


def test_copies_files_and_graphs(pair: Any, rng: np.random.Generator) -> None:
    """deepcopy, torch.save and load with weights_only, module.to, and torch.compile."""
    made, *_ = pair
    module = made("fp8-block", "packed")
    x, dy = inputs()
    wanted = passed(module, x, dy)
    twin = copy.deepcopy(module)
    assert twin.weight1.blocks.data_ptr() != module.weight1.blocks.data_ptr()
    assert all(map(torch.equal, passed(twin.to("cpu"), x, dy), wanted))
    file = io.BytesIO()
    torch.save({"w": module.weight1}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert isinstance(loaded, PackedWeight)
    assert isinstance(loaded, nn.Parameter)
    assert torch.equal(loaded.blocks, module.weight1.blocks)
    assert torch.equal(loaded.scales, module.weight1.scales)
    assert (loaded.interleave, loaded.recipe) == (module.weight1.interleave, module.weight1.recipe)
    assert twin.share_memory().weight1.is_shared()
    assert all(map(torch.equal, passed(twin, x, dy), wanted))
    twin.weight1.blocks.zero_()
    twin.weight1.data = loaded.data
    assert torch.equal(twin.weight1.blocks, module.weight1.blocks)
    twin.weight1 = copy.deepcopy(module.weight1)
    twin.weight1.blocks.zero_()
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin.weight1.blocks, module.weight1.blocks)
    for write in (save_checkpoint, save_distributed):
        with pytest.raises(ValueError, match="weight1 is MXFP4 alone, as in the file"):
            write(module, "nowhere")
    with pytest.raises(ValueError, match="weight1 is MXFP4 alone, as in the file"):
        next(iter(expert_tensors(module, "compressed-tensors-mxfp4")))
    sizes = () if isinstance(module, MoE) else (torch.tensor(SIZES),)
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x, *sizes)
    assert all(map(torch.equal, [y, torch.autograd.grad(y, x, dy)[0]], wanted))


def test_what_does_not_fit_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    """One sentence each, before anything is replaced."""
    blocks, scales = torch.zeros(G, 8, 32, dtype=torch.uint8), torch.full((G, 8, 2), 127, dtype=torch.uint8)
    weight = PackedWeight(blocks, scales, MXFP8(), torch.bfloat16)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((blocks.float(), scales, MXFP8(), torch.bfloat16), r"blocks is float32 \[3, 8, 32\]; give uint8"),
        ((blocks, scales[:, :, :1], MXFP8(), torch.bfloat16), r"give scales \[3, 8, 2\] on its device"),
        ((blocks, scales, "mxfp8", torch.bfloat16), "recipe is 'mxfp8'; give a Recipe"),
        ((blocks, scales, MXFP8(), torch.int8), "dtype is torch.int8"),
        ((blocks, scales, MXFP8(), torch.bfloat16, 3), "interleave is 3 and the weight has 8 rows; give a divisor"),
        ((blocks, scales, MXFP8(), torch.bfloat16, None), "interleave is None; give the gate rows per block"),
        ((blocks, scales, MXFP8(dgrad="high_precision"), torch.bfloat16), "recipe is mxfp8, which takes scales from"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            PackedWeight(*given)
    for function in (
        lambda: weight + 1, lambda: torch.cat([weight]), lambda: weight.float().sum(), lambda: np.from_dlpack(weight),
        lambda: setattr(weight, "data", weight.dequantize()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"that is MXFP4 alone; give it to a GroupedMLP"):
            function()
    with pytest.raises(ValueError, match="that is MXFP4 alone"):
        grouped_linear(torch.randn(M, 64).bfloat16(), weight, SIZES, recipe="mxfp8", backend=REFERENCE)
    layer = GroupedLinear(G, 64, 8, recipe="mxfp8", dtype=torch.bfloat16, backend=REFERENCE)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match="that is MXFP4 alone"):
        layer(torch.randn(M, 64).bfloat16(), SIZES)
    fp8 = nn.ModuleDict({"experts": KINDS["GroupedMLP"](recipe="fp8-block")})
    export_experts(fp8, tmp_path / "fp8", "hf-fp8")
    before = fp8["experts"].weight1
    with pytest.raises(ValueError, match=r"weights is 'packed' and the file's experts\.weight1 is not MXFP4"):
        load_experts(fp8, tmp_path / "fp8", weights="packed")
    assert fp8["experts"].weight1 is before
    delayed = nn.ModuleDict({"experts": KINDS["GroupedMLP"](recipe="fp8-delayed")})
    with pytest.raises(ValueError, match="the recipe of experts is delayed"):
        load_experts(delayed, tmp_path / "fp8", weights="packed")
    wide = KINDS["GroupedMLP"](recipe="mxfp8")
    fill(wide)
    wide.weight2.data[:, 0].mul_(2.0**-20)  # binades that no block of 32 rows has in E4M3
    folder = tmp_path / "wide"
    export_experts(nn.ModuleDict({"experts": wide}), folder, "gpt-oss-mxfp4")
    narrow = nn.ModuleDict({"experts": KINDS["GroupedMLP"](recipe="fp8-block")})
    with pytest.raises(ValueError, match=r"experts\.weight2\.rowwise does not hold the file's values"):
        load_experts(narrow, folder, weights="packed")
    trained = nn.ModuleDict({"experts": KINDS["GroupedMLP"](recipe=None)})
    assert load_experts(trained, folder, weights="packed") == {}
    trained["experts"].weight1.requires_grad_()
    with pytest.raises(ValueError, match="weight is MXFP4 alone and requires a gradient; freeze it"):
        trained["experts"](torch.randn(M, K).bfloat16(), SIZES)
