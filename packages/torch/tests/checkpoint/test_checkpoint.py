"""Checkpoint files: tensors as they are, recipes with fingerprints, weights as codes; nothing that is executed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import arrays, metadata, rewrite
from torch import Tensor, nn

import octavo_torch
from octavo import MXFP8, NVFP4, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_torch import (
    GroupedLinear,
    GroupedMLP,
    check_recipe_state,
    convert_linears,
    load_checkpoint,
    recipe_state,
    save_checkpoint,
    update_scales,
)
from octavo_torch.checkpoint.files import digest
from octavo_torch.linear.coded_weight import CodedWeight

G, K, F, M = 3, 64, 48, 50
SIZES = [20, 0, 25]
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=3),
    "mxfp8-square": MXFP8(square_weights=True),
    "nvfp4-1x16": NVFP4(square_weights=False),
    "fprop alone": BlockScaling(dgrad="high_precision", wgrad="high_precision"),
}
CODED = [name for name in RECIPES if name != "bf16"]


@pytest.mark.parametrize("quantized", [False, True])
def test_tied_weights(tmp_path: Path, quantized: bool) -> None:
    """Two layers with one parameter: a file has no two names for one array, so each name has its own."""
    module = nn.ModuleDict({name: GroupedLinear(G, K, K, recipe="mxfp8", dtype=torch.bfloat16) for name in "ab"})
    module["b"].weight = module["a"].weight
    wanted = module["a"](torch.ones(M, K, dtype=torch.bfloat16), SIZES)
    save_checkpoint(module, tmp_path / "tied", quantized=quantized)
    other = nn.ModuleDict({name: GroupedLinear(G, K, K, recipe="mxfp8", dtype=torch.bfloat16) for name in "ab"})
    load_checkpoint(other, tmp_path / "tied")
    for name in "ab":
        assert torch.equal(other[name](torch.ones(M, K, dtype=torch.bfloat16), SIZES), wanted)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
@pytest.mark.parametrize("layer", [GroupedLinear, GroupedMLP])
def test_parameters_of_groups_are_values_in_a_file_of_codes(layer: Any, recipe: str, tmp_path: Path) -> None:
    """weight1 and weight2 are experts of GroupedLinear, and layers of GroupedMLP: as codes the former were in a file
    that nothing could load."""
    made, other = (layer(G, K, F, recipe=RECIPES[recipe], per_group_parameters={"weight"}, bias=True) for _ in range(2))
    save_checkpoint(made, tmp_path / "parted", quantized=True)
    assert set(arrays(tmp_path / "parted")) == set(made.state_dict())
    load_checkpoint(other, tmp_path / "parted")
    x = torch.randn(M, K)
    assert torch.equal(other(x, SIZES), made(x, SIZES))


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """One line that names it; nothing is left behind."""
    with pytest.raises(ValueError, match=r"path is '.*absent/file' and cannot be written: .*; give one that can"):
        save_checkpoint(GroupedLinear(G, K, K, recipe="mxfp8"), tmp_path / "absent" / "file")
    assert not [*tmp_path.iterdir()]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Weights that are one parameter are one after codes have been loaded into them, too."""
    layers = nn.ModuleList([GroupedLinear(G, K, F, recipe="mxfp8", dtype=torch.bfloat16) for _ in "ab"])
    layers[1].weight = layers[0].weight
    save_checkpoint(layers, tmp_path / "codes", quantized=True)
    load_checkpoint(layers, tmp_path / "codes")
    assert isinstance(layers[0].weight, CodedWeight)
    assert layers[1].weight is layers[0].weight


@pytest.mark.parametrize("name", CODED)
def test_torch_load_of_codes(tmp_path: Path, name: str) -> None:
    """torch.save and torch.load with its default, weights_only=True, which runs no code of a file."""
    layer = GroupedLinear(G, K, F, recipe=RECIPES[name], dtype=torch.bfloat16, seed=1)
    save_checkpoint(layer, tmp_path / "codes", quantized=True)
    load_checkpoint(layer, tmp_path / "codes")
    torch.save(layer.state_dict(), tmp_path / "state")
    weight = torch.load(tmp_path / "state", weights_only=True)["weight"]
    assert isinstance(weight, CodedWeight)
    assert not weight.requires_grad
    x = torch.randn(M, K, dtype=torch.bfloat16)
    wanted = layer(x, SIZES)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert torch.equal(layer(x, SIZES), wanted)
    torch.save(layer, tmp_path / "module")
    whole = torch.load(tmp_path / "module", weights_only=False)
    assert isinstance(whole.weight, nn.Parameter)
    assert torch.equal(whole(x, SIZES), wanted)


def model(recipe: Recipe, seed: int = 3) -> nn.Module:
    return nn.ModuleDict(
        {
            "router": nn.Linear(K, G, dtype=torch.bfloat16),
            "fc": GroupedLinear(G, K, F, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed),
            "mlp": GroupedMLP(G, F, 32, recipe=recipe, dtype=torch.bfloat16, seed=seed),
        }
    )


def run(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module["mlp"](module["fc"](x, SIZES), SIZES)
    return out


def trained(recipe: Recipe) -> nn.Module:
    """After a step, so that histories, scales and counters have moved."""
    made = model(recipe)
    for _ in range(2):
        run(made, torch.randn(M, K, dtype=torch.bfloat16)).square().mean().backward()
        update_scales(made)
    made.zero_grad()
    return made


@pytest.mark.parametrize("name", RECIPES)
def test_every_array_comes_back(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Values: hashes of all arrays after loading are those of the file, and a step goes on bit for bit (faults.md 47,
    51)."""
    made, path = trained(RECIPES[name]), tmp_path / "model.safetensors"
    save_checkpoint(made, path)
    loaded = model(RECIPES[name], seed=99)
    load_checkpoint(loaded, path)
    assert {key: digest(value) for key, value in loaded.state_dict().items()} == metadata(path)["sha256"]
    x = torch.randn(M, K, dtype=torch.bfloat16)
    for one in (made, loaded):
        run(one, x).sum().backward()
    for left, right in zip(made.parameters(), loaded.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        assert left.grad is None or torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("name", CODED)
def test_codes_are_kept_verbatim(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Codes and scales in the file are those that a forward reads; loaded and saved again the file is the same, byte
    for byte, however often (faults.md 50). The loaded module's results are those of the values' module."""
    made = trained(RECIPES[name]).eval()
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    save_checkpoint(made, first, quantized=True)
    saved = arrays(first)
    assert "fc.weight" not in saved
    layer: Any = made["fc"]  # type: ignore[index]
    spec = RECIPES[name].quantizer("w")
    assert spec is not None
    scale = layer.delayed_state.encode_scale("w") if RECIPES[name].stateful else None
    codes = octavo_torch.quantize(layer.weight.detach(), spec, scale=scale)
    assert torch.equal(saved["fc.weight.rowwise"].view(torch.uint8), codes.rowwise.view(torch.uint8))  # type: ignore[union-attr]
    assert torch.equal(saved["fc.weight.rowwise_scale"].view(torch.uint8), codes.rowwise_scale.view(torch.uint8))  # type: ignore[union-attr]
    loaded = model(RECIPES[name], seed=99).eval()
    for _ in range(2):
        load_checkpoint(loaded, first)
        save_checkpoint(loaded, again)
        assert again.read_bytes() == first.read_bytes()
    assert isinstance(loaded["fc"].weight, CodedWeight)  # type: ignore[index, union-attr]
    x = torch.randn(M, K, dtype=torch.bfloat16)
    assert torch.equal(run(loaded, x), run(made, x))
    assert torch.equal(run(copy.deepcopy(loaded), x), run(made, x))


def test_codes_carry_a_gradient_through(tmp_path: Path, rng: np.random.Generator) -> None:
    """A frozen layer of codes passes dx on as the layer of values does, and its values are nowhere to be had."""
    made, path = trained(PRESETS["mxfp8"]), tmp_path / "model.safetensors"
    save_checkpoint(made, path, quantized=True)
    loaded = model(PRESETS["mxfp8"])
    load_checkpoint(loaded, path)
    x, dx = torch.randn(M, K, dtype=torch.bfloat16), []
    for one in (made, loaded):
        leaf = x.clone().requires_grad_()
        run(one, leaf).sum().backward()
        dx.append(leaf.grad)
    assert torch.equal(dx[0], dx[1])
    weight: Any = loaded["fc"].weight  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="codes of recipe mxfp8 alone"):
        weight + 1
    save_checkpoint(trained(RECIPES["fprop alone"]), path, quantized=True)
    loaded = model(RECIPES["fprop alone"])
    load_checkpoint(loaded, path)
    with pytest.raises(ValueError, match=r"backward reads values .*dgrad='high_precision'"):
        run(loaded, x.requires_grad_()).sum().backward()


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    """By the field that differs; values may be taken on purpose, codes may not."""
    path = tmp_path / "model.safetensors"
    for quantized in (False, True):
        save_checkpoint(model(MXFP8()), path, quantized=quantized)
        other = model(MXFP8(gradient_format="e5m2"))
        with pytest.raises(ValueError, match="gradient_format"):
            load_checkpoint(other, path)
        if quantized:
            with pytest.raises(ValueError, match="gradient_format"):
                load_checkpoint(other, path, recipes="any")
        else:
            load_checkpoint(other, path, recipes="any")


class Bomb:
    """What a pickle can do."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def test_a_sharded_checkpoint_of_another_recipe_is_refused() -> None:
    """torch.distributed.checkpoint keeps tensors alone, so recipes travel as fingerprints: another field is another."""

    def made(recipe: Recipe) -> nn.Module:
        return nn.Sequential(GroupedLinear(2, 32, 32, recipe=recipe), GroupedLinear(2, 32, 32, recipe=MXFP8()))

    saved = recipe_state(made(MXFP8()))
    check_recipe_state(made(MXFP8()), saved)
    with pytest.raises(ValueError, match=r"0.recipe_fingerprint is [0-9a-f]{16} in the checkpoint and [0-9a-f]{16} "):
        check_recipe_state(made(MXFP8(wgrad="high_precision")), saved)
    with pytest.raises(ValueError, match=r"has no recipe of 1\.recipe_fingerprint; make the module as it was"):
        check_recipe_state(made(MXFP8()), {"0.recipe_fingerprint": saved["0.recipe_fingerprint"]})


def test_layers_that_were_not_made_again_are_named(tmp_path: Path) -> None:
    """A process that forgets convert_linears is told of it, and its first layers, however many there are."""
    attention = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(14)))
    convert_linears(attention, MXFP8(), "*")
    save_checkpoint(attention, tmp_path / "model.safetensors")
    plain = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(14)))
    message = "recipes of 0, 1, 10, 11, 12, 13, 2, 3, 4, 5, 6, 7 and 2 more, which .* by the same convert_linears"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(plain, tmp_path / "model.safetensors")
    convert_linears(plain, MXFP8(), "*")
    load_checkpoint(plain, tmp_path / "model.safetensors")


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    """A pickle, or an archive of torch.save, is refused as a checkpoint without being executed."""
    path, canary = tmp_path / "model.safetensors", tmp_path / "canary"
    for write in (lambda: path.write_bytes(pickle.dumps(Bomb(canary))), lambda: torch.save(Bomb(canary), path)):
        write()
        with pytest.raises(ValueError, match=r"not a complete safetensors file: .* load it by torch\.load"):
            load_checkpoint(model(MXFP8()), path)
        assert not canary.exists()


def test_a_damaged_file_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    """Cut anywhere, or any bit turned: ValueError, and what the module had is unchanged."""
    made, path = model(DelayedScaling(history=3)), tmp_path / "model.safetensors"
    save_checkpoint(made, path, quantized=True)
    whole = path.read_bytes()
    loaded = model(DelayedScaling(history=3), seed=99)
    before = {name: digest(value) for name, value in loaded.state_dict().items()}
    for _ in range(60):
        damaged = bytearray(whole[: int(rng.integers(0, len(whole)))])
        if rng.random() < 0.7:
            damaged = bytearray(whole)
            at = int(rng.integers(0, len(whole) if rng.random() < 0.5 else 400))
            damaged[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        try:
            load_checkpoint(loaded, path)
        except ValueError:
            assert {name: digest(value) for name, value in loaded.state_dict().items()} == before
        else:
            pytest.fail(f"a file with {len(damaged)} of {len(whole)} bytes was loaded")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none(bad: float, tmp_path: Path) -> None:
    """Zero, negative, NaN and infinite scales are refused where digests fit, too: of codes and of delayed scaling."""
    path = tmp_path / "model.safetensors"
    for name, quantized in (("fc.encode_scale", False), ("fc.weight.rowwise_scale", True)):
        save_checkpoint(model(DelayedScaling(history=3)), path, quantized=quantized)
        saved, said = arrays(path), metadata(path)
        saved[name].view(-1)[1] = bad
        rewrite(path, saved, said)
        with pytest.raises(ValueError, match="not a scale of finite values"):
            load_checkpoint(model(DelayedScaling(history=3)), path)


def test_what_does_not_fit(tmp_path: Path) -> None:
    """Other shapes, a missing array, a module on the meta device: named, before anything is silently left out."""
    path = tmp_path / "model.safetensors"
    save_checkpoint(model(MXFP8()), path)
    with pytest.raises(ValueError, match="create a matching module"):
        load_checkpoint(model(MXFP8()).float(), path)
    with pytest.raises(ValueError, match="meta device"):
        load_checkpoint(model(MXFP8()).to("meta"), path)
    saved, said = arrays(path), metadata(path)
    del saved["router.bias"]
    rewrite(path, saved, said)
    with pytest.raises(ValueError, match=r"lacks \['router.bias'\]"):
        load_checkpoint(model(MXFP8()), path)
    with pytest.raises(ValueError, match="recipes is 'other'"):
        load_checkpoint(model(MXFP8()), path, recipes="other")  # type: ignore[arg-type]


def test_size_does_not_grow(tmp_path: Path) -> None:
    """A file after 20 steps is as long as after none (faults.md 48)."""
    made, path = model(DelayedScaling(history=3)), tmp_path / "model.safetensors"
    save_checkpoint(made, path)
    before = path.stat().st_size
    for _ in range(20):
        update_scales(made)
    save_checkpoint(made, path)
    assert path.stat().st_size == before
