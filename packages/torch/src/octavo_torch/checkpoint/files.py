"""Checkpoints of modules in safetensors files: tensors as they are, recipes with fingerprints, weights as codes.

A file holds arrays and JSON, nothing that is executed when it is read. Its metadata has the format's version, the
recipe of every grouped layer, what is needed to read quantized weights, and the SHA-256 of every array and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.checks import check_flag, check_module, check_path, told
from octavo_torch.checkpoint import codes
from octavo_torch.checkpoint.recipes import check_recipes_json, recipe_layers, recipes_json
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.scaling.recipe_module import RecipeModule

VERSION = 1
_KEY = "octavo"
"""Of the metadata's one entry: a digest, a space, and the JSON that it is of. Two entries would have no fixed order."""


def save_checkpoint(module: nn.Module, path: str | Path, *, quantized: bool = False) -> None:
    """Write the state dict of `module` and its recipes to one safetensors file. Needs the package safetensors.

    quantized   weights of grouped layers as the codes and scales that the next forward reads, not as values; weights
                that are codes already are written so in any case, unchanged

    Raises ValueError for sharded parameters: torch.distributed.checkpoint saves those, with `recipe_state` beside them.
    """
    from safetensors.torch import save_file

    check_module(module)
    check_path("path", path)
    check_flag("quantized", quantized)
    tensors, weights = dict(_plain_state(module)), {}
    for name, layer, parameter, number in _weights(module):
        weight = layer._parameters[parameter]
        if weight is None or not (quantized or isinstance(weight, CodedWeight)):
            continue
        made = codes.codes_of(layer, weight, number)
        if made is not None:
            del tensors[name]
            tensors |= codes.to_tensors(name, made)
            weights[name] = codes.describe(made, weight.dtype, codes.interleave_of(layer, number))
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    said = {
        "version": VERSION,
        "recipes": json.loads(recipes_json(module)),
        "weights": weights,
        "sha256": {name: digest(value) for name, value in tensors.items()},
    }
    text = json.dumps(said, sort_keys=True)
    save_file(tensors, str(path), {_KEY: f"{hashlib.sha256(text.encode()).hexdigest()} {text}"})


def load_checkpoint(module: nn.Module, path: str | Path, *, recipes: Literal["same", "any"] = "same") -> None:
    """Read what `save_checkpoint` wrote into `module`: every array of the file, for every one of the module.

    Weights that were saved as codes become CodedWeight parameters with just these codes, which take no gradient. Every
    array's digest, shape and dtype is checked, and that scales are scales.

    recipes   "same": each grouped layer has the recipe that it was saved with; "any": values may be loaded for another
              recipe, codes may not

    Raises ValueError for a file that is damaged, is no such checkpoint, or does not fit `module`.
    """
    check_module(module)
    check_path("path", path)
    if not isinstance(recipes, str) or recipes not in ("same", "any"):
        raise ValueError(f"recipes is {told(recipes)}; give 'same' or 'any'")
    said, tensors = _read(Path(path))
    if recipes == "same" or said["weights"]:
        check_recipes_json(module, said["recipes"])
    found = {name: (layer, parameter, number) for name, layer, parameter, number in _weights(module)}
    coded: dict[str, CodedWeight] = {}
    for name, about in said["weights"].items():
        if name not in found:
            raise ValueError(f"the checkpoint has codes of {name}, which is no weight of a grouped layer here")
        layer, parameter, number = found[name]
        made, dtype = codes.from_tensors(name, about, tensors)
        own = codes.interleave_of(layer, number)
        if about.get("interleave") != own:
            raise ValueError(
                f"{name} was saved with interleave={about.get('interleave')} and has {own} here; make it alike"
            )
        _check_like(name, layer._parameters[parameter], made.shape, dtype)
        for plane in codes.to_tensors(name, made):
            del tensors[plane]
        device = layer._parameters[parameter].device  # type: ignore[union-attr]
        coded[name] = codes.weight_of(layer, _moved(made, device), dtype, number)
    state = module.state_dict()
    for name, value in tensors.items():
        if name in state:
            _check_like(name, state[name], value.shape, value.dtype)
        if name.rpartition(".")[2] == "encode_scale":
            codes.check_scales(name, value, "fp32")
        if name in state and state[name].is_meta:
            raise ValueError(f"{name} is on the meta device, where loading does nothing; call module.to_empty first")
    _load(module, tensors, coded.keys())
    for name, weight in coded.items():
        layer, parameter, _ = found[name]
        layer._parameters[parameter] = nn.Parameter(weight, requires_grad=False)


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hex digits."""
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()


def _plain_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            raise ValueError(
                f"{name} is sharded over {value.device_mesh}; save it with torch.distributed.checkpoint, and "
                "octavo_torch.recipe_state beside it"
            )
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__} in the state dict; a checkpoint holds tensors alone")
        yield name, value


def _weights(module: nn.Module) -> Iterator[tuple[str, RecipeModule, str, int]]:
    """Full name, layer, name in the layer and number in the layer of every weight [G, N, K] of a grouped layer."""
    for prefix, layer in recipe_layers(module).items():
        for parameter, number in (("weight", 0), ("weight1", 0), ("weight2", 1)):
            if layer._parameters.get(parameter) is not None:
                yield f"{prefix}.{parameter}" if prefix else parameter, layer, parameter, number


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the arrays of a file, digests checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}; copy or save it again") from None
    try:
        check, _, text = metadata[_KEY].partition(" ")
        said = json.loads(text)
        version, digests = said["version"], said["sha256"]
        well_formed = all(isinstance(said[part], Mapping) for part in ("recipes", "weights", "sha256"))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path} says nothing of Octavo; load_checkpoint reads what save_checkpoint wrote") from None
    if hashlib.sha256(text.encode()).hexdigest() != check:
        raise ValueError(f"what {path} says of its arrays was changed after it was saved; copy or save it again")
    if version != VERSION or not well_formed:
        raise ValueError(
            f"{path} has version {version!r} and this octavo-torch reads {VERSION}; install the one that wrote it"
        )
    if digests.keys() != tensors.keys():
        raise ValueError(
            f"{path} has arrays {sorted(digests.keys() ^ tensors.keys())} of which its list knows or lacks"
        )
    for name, value in tensors.items():
        if digest(value) != digests[name]:
            raise ValueError(f"{name} in {path} has other bytes than were saved; copy or save it again")
    return said, tensors


def _load(module: nn.Module, tensors: Mapping[str, Tensor], coded: Set[str]) -> None:
    """Every array into its place; those of `coded` need none."""
    try:
        missing, unknown = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the module: {error}") from None
    missing = [name for name in missing if name not in coded]
    if missing or unknown:
        raise ValueError(f"the checkpoint lacks {missing} and has {unknown}, which the module has not")


def _check_like(name: str, own: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
    if own is None or own.shape != shape or own.dtype is not dtype:
        here = "absent" if own is None else f"{own.dtype} {list(own.shape)}"
        raise ValueError(f"{name} is {dtype} {list(shape)} in the checkpoint and {here} here; make the module alike")


def _moved(made: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda plane: plane.to(device), made)


__all__ = ["digest", "load_checkpoint", "save_checkpoint"]
