"""Checkpoints of modules in safetensors files: tensors, recipes with fingerprints, and weights as values or codes.

A file holds arrays and JSON; reading it executes nothing. Its metadata has the format's version, the recipe of every
grouped layer, the description of quantized weights, and the SHA-256 of every array and of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.errors import one_of, printable
from octavo_torch.arrays.checks import check_flag, check_module, check_path
from octavo_torch.arrays.grouped_tensor import on_device
from octavo_torch.arrays.selection import name_in, saved_name
from octavo_torch.checkpoint import codes
from octavo_torch.checkpoint.expert_ranks import check_own_experts, own_experts
from octavo_torch.checkpoint.formats.package import check_safetensors
from octavo_torch.checkpoint.recipes import check_recipes_json, recipe_layers, recipes_json
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.scaling.recipe_module import RecipeModule
from octavo_torch.scaling.saved_state import CONVERT, STATE_BUFFERS

VERSION = 1
_KEY = "octavo"
"""Key of the single metadata entry: a digest, a space, and its JSON. Two entries would have no fixed order."""


def save_checkpoint(module: nn.Module, path: str | Path, *, quantized: bool = False) -> None:
    """Write the state dict of `module` and its recipes to one safetensors file. Needs the package safetensors.

    quantized   write weights of grouped layers as the codes and scales that the next forward reads, not as values;
                weights that are already codes are always written unchanged, and those of a Linear, or of a layer with
                one parameter per group, as values

    Of a MoE with `ep` it has this rank's experts, and no other rank loads it: give each rank a path of its own.
    Tensors that share memory, as tied weights do, are written once under each of their names. A file that was at `path`
    is replaced when the new one is complete, so that an end in between leaves it as it was.
    Raises ValueError for PackedWeights, for codes in modules of another library, as `freeze_experts` makes them, and
    for sharded parameters: save the latter and `recipe_state` with torch.distributed.checkpoint.
    """
    check_module(module)
    check_path("path", path)
    check_flag("quantized", quantized)
    codes.check_not_packed(module)
    tensors, weights = dict(_plain_state(module)), {}
    for weight in _weights(module):
        if not (quantized or isinstance(weight.value, CodedWeight)):
            continue
        quantized_weight = codes.codes_of(weight.layer, weight.value, weight.number)
        if quantized_weight is not None:
            del tensors[weight.name]
            tensors |= codes.to_tensors(weight.name, quantized_weight)
            interleave = codes.interleave_of(weight.layer, weight.number)
            weights[weight.name] = codes.describe(quantized_weight, weight.value.dtype, interleave)
    for name, value in tensors.items():
        if isinstance(value, CodedWeight):
            raise ValueError(
                f"{name} is codes in a module of another library, of whose weights a checkpoint holds values alone; "
                "write the state_dict with torch.save, or the adapters beside the codes as PEFT does"
            )
    tensors = _without_shared_memory({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    spread = own_experts(module)
    header = {
        **({"experts": spread} if spread else {}),
        "version": VERSION,
        "recipes": json.loads(recipes_json(module)),
        "weights": weights,
        "sha256": {name: digest(value) for name, value in tensors.items()},
    }
    text = json.dumps(header, sort_keys=True)
    _write(tensors, Path(path), {_KEY: f"{hashlib.sha256(text.encode()).hexdigest()} {text}"})


def load_checkpoint(module: nn.Module, path: str | Path, *, recipes: Literal["same", "any"] = "same") -> None:
    """Load a file that `save_checkpoint` wrote into `module`; file and module must have the same arrays.

    Weights that were saved as codes become CodedWeight parameters with exactly these codes, which take no gradient. A
    parameter that is a CodedWeight already gets the codes in place: an optimizer or a MasterWeights that has it goes on
    with it. Digest, shape and dtype of every array are checked, and that scales are finite and positive.

    recipes   "same": each grouped layer must have the recipe that it was saved with; "any": values may be loaded for
              another recipe, codes may not

    Raises ValueError for a file that is damaged, is not such a checkpoint, or does not fit `module`.
    """
    check_module(module)
    check_path("path", path)
    one_of("recipes", recipes, ("same", "any"))
    header, tensors = _read(Path(path))
    if recipes == "same" or header["weights"]:
        check_recipes_json(module, header["recipes"])
    check_own_experts(module, header.get("experts"))
    weights = {weight.name: weight for weight in _weights(module)}
    coded: dict[str, CodedWeight] = {}
    for name, entry in header["weights"].items():
        if name not in weights:
            raise ValueError(
                f"the checkpoint has codes of {name}, and here no grouped layer has a parameter of this name for all "
                "groups; create the module like the saved one, or save it with quantized=False"
            )
        own_weight = weights[name]
        weight_codes, dtype = codes.from_tensors(name, entry, tensors)
        saved, own = entry.get("interleave"), codes.interleave_of(own_weight.layer, own_weight.number)
        if saved != own:
            raise ValueError(f"{name} was saved with interleave={saved} and has {own} here; create it with {saved}")
        _check_like(name, own_weight.value, weight_codes.shape, dtype)
        for plane in codes.to_tensors(name, weight_codes):
            del tensors[plane]
        # copied: what was read is the file's own memory, and changes where somebody writes into the file
        on_own_device = on_device(weight_codes, own_weight.value.device, copy=True)
        coded[name] = codes.weight_of(own_weight.layer, on_own_device, dtype, own_weight.number)
    state = module.state_dict()
    of_state = {name for name in (*tensors, *state) if name.rpartition(".")[2] in STATE_BUFFERS}
    _check_complete(sorted(of_state - tensors.keys()), sorted(of_state - state.keys()))
    for name, value in tensors.items():
        if name in state:
            _check_like(name, state[name], value.shape, value.dtype)
        if name.rpartition(".")[2] == "encode_scale":
            codes.check_scales(name, value, "fp32")
        if name in state and state[name].is_meta:
            raise ValueError(f"{name} is on the meta device, where loading does nothing; call module.to_empty first")
    _load(module, tensors, coded.keys())
    replacements: dict[Tensor, nn.Parameter] = {}  # tied weights stay one parameter
    for name, loaded in coded.items():
        present = weights[name].value
        if isinstance(present, CodedWeight):
            codes.write_into(present, loaded)
        else:
            new = replacements.setdefault(present, nn.Parameter(loaded, requires_grad=False))
            weights[name].layer._parameters[weights[name].parameter] = new


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hex digits."""
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where an earlier one has the same memory: a file has no two names for one array."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, value in tensors.items():
        memory = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if memory in seen and value.numel() else value
        seen.add(memory)
    return apart


def _plain_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            raise ValueError(
                f"{name} is sharded over {value.device_mesh}; save it and octavo_torch.recipe_state with "
                "torch.distributed.checkpoint"
            )
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__} in the state dict; a checkpoint holds tensors only")
        yield name, value


class _Weight(NamedTuple):
    """A weight [G, N, K] of a grouped layer.

    name        in the module that is saved
    parameter   its name in the layer
    number      0 for the weight of a layer's first GEMM, 1 for that of a second one
    """

    name: str
    layer: RecipeModule
    parameter: str
    number: int

    @property
    def value(self) -> nn.Parameter:
        """The layer's parameter."""
        value = self.layer._parameters[self.parameter]
        assert value is not None  # `_weights` has left it out otherwise
        return value


def _weights(module: nn.Module) -> Iterator[_Weight]:
    """The weights of the grouped layers in `module`, except of layers with one parameter per group.

    Of such a GroupedLinear the second and third group's parameters are called weight1 and weight2.
    """
    for prefix, layer in recipe_layers(module).items():
        for parameter, number in (("weight", 0), ("weight1", 0), ("weight2", 1)):
            own = parameter in layer._shapes and not layer.is_per_group(parameter)
            if own and layer._parameters.get(parameter) is not None:
                yield _Weight(name_in(prefix, parameter), layer, parameter, number)


def _write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """The file, beside `path` until it is complete: safetensors before 0.8 writes into a file that is there."""
    check_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = Path(f"{path}.{os.getpid()}.part")
    try:
        save_file(tensors, str(part), metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path is {str(path)!r} and cannot be written: {error}; give one that can") from None
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the arrays of a file, after checking the digests."""
    check_safetensors()
    from safetensors import SafetensorError, safe_open

    named = printable(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{named} is not a complete safetensors file: {printable(error)}; copy or save it again, or, if "
            "torch.save wrote it, load it by torch.load and the module's load_state_dict"
        ) from None
    try:
        check, _, text = metadata[_KEY].partition(" ")
        header = json.loads(text)
        version, digests = header["version"], header["sha256"]
        well_formed = all(isinstance(header[part], Mapping) for part in ("recipes", "weights", "sha256"))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{named} lacks Octavo's metadata; load_checkpoint reads what save_checkpoint wrote") from None
    if hashlib.sha256(text.encode()).hexdigest() != check:
        raise ValueError(f"the metadata of {named} was changed after it was saved; copy or save it again")
    if version != VERSION or not well_formed:
        raise ValueError(
            f"{named} has version {version!r} and this octavo-torch reads {VERSION}; install the one that wrote it"
        )
    if digests.keys() != tensors.keys():
        raise ValueError(
            f"{named} and its own list of arrays differ in {sorted(digests.keys() ^ tensors.keys())}; "
            "copy or save it again"
        )
    for name, value in tensors.items():
        if digest(value) != digests[name]:
            raise ValueError(f"{name} in {named} has other bytes than were saved; copy or save it again")
    return header, tensors


def _load(module: nn.Module, tensors: Mapping[str, Tensor], coded: Set[str]) -> None:
    """Load every array into the module's state; the weights in `coded` are not among them."""
    try:
        missing, unknown = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the module: {error}") from None
    # torch reports them by the module's names, and not by the state dict's
    _check_complete([name for name in map(saved_name, missing) if name not in coded], unknown)


def _check_complete(missing: list[str], unknown: list[str]) -> None:
    """ValueError where the checkpoint lacks arrays of the module, or the module some of the checkpoint."""
    if missing or unknown:
        of_state = any(name.rpartition(".")[2] in STATE_BUFFERS for name in (*missing, *unknown))
        raise ValueError(
            f"the checkpoint lacks {missing} and has {unknown}, which the module does not have"
            + (f": the recipes' states differ; {CONVERT}" if of_state else "")
        )


def _check_like(name: str, own: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if own.shape != shape or own.dtype is not dtype:
        here = f"{own.dtype} {list(own.shape)}"
        raise ValueError(f"{name} is {dtype} {list(shape)} in the checkpoint and {here} here; create a matching module")


__all__ = ["digest", "load_checkpoint", "save_checkpoint"]
