"""load_experts: codes and scales of quantized files into a module's weights, a matrix at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo import GroupedTensorSpec
from octavo.errors import one_of
from octavo_torch.arrays.checks import brief, check_device, check_flag, check_module, check_path
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.arrays.group_parameters import reshard
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.arrays.selection import name_in, saved_modules
from octavo_torch.checkpoint.codes import interleave_of, weight_of, write_into
from octavo_torch.checkpoint.experts import check_names
from octavo_torch.checkpoint.formats.blocks import MXFP4, pack
from octavo_torch.checkpoint.formats.places import Matrices, find, path_of
from octavo_torch.checkpoint.formats.planes import Misfit, Planes
from octavo_torch.checkpoint.formats.source import Source
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.mlp.experts import Experts
from octavo_torch.mlp.packed_weight import PackedWeight


@torch.no_grad()
def load_experts(
    module: nn.Module,
    path: str | Path,
    *,
    prefix: str = "",
    names: Sequence[str] | None = None,
    experts: Sequence[int] | None = None,
    weights: Literal["codes", "values", "packed"] = "codes",
    exact: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """Load the experts of a published, quantized model into the GroupedMLPs and MoEs of `module`, as CodedWeights.

    path      a folder with model.safetensors.index.json, or with one safetensors file, or such a file, in one of these
              layouts: Hugging Face's FP8, compressed-tensors' FP8, MXFP8 and MXFP4, gpt-oss's MXFP4, ModelOpt's NVFP4
    prefix    what the file's names have before the module's, such as "model."; a module whose name does not end in
              "experts" has its experts under <name>.experts
    names     (gate, up, down), or (up, down) of experts without a gate; None: recognized as stack_experts does
    experts   the numbers of the experts to load, such as range(8, 16) of a rank; None: all, of a MoE with `ep`
              those that this rank's experts have among all
    weights   "codes": each weight becomes a CodedWeight of its module's recipe, with the file's codes and scales where
              the recipe has such blocks, else with codes of the file's values; "values": it gets the file's values;
              "packed": of MXFP4 files, a frozen PackedWeight of the file's bytes, which each call expands
    exact     raise ValueError where a plane, or the dtype of values, does not hold the file's values; False rounds them
    device    of the loaded weights; None: where the module's are

    Returns the planes that do not hold the file's values, and how many of their elements differ: nothing where `exact`.
    Parameters keep `requires_grad`, except packed ones, and are the same ones as before where the file's values or
    codes fit into them. Everything is read and checked before any weight is replaced; a module on the meta device has
    no others in memory meanwhile. Needs the package safetensors, executes nothing of the
    file, and opens no file outside of its folder. Raises ValueError for a file that is damaged or does not fit
    `module`.
    """
    check_module(module)
    check_path("path", path)
    _check_options(prefix, names, weights, exact)
    if device is not None:
        check_device(device)
    reshard(module)
    found = dict(experts_of(module))
    for name, layer in found.items():
        _check_parameters(name, layer)
        if device is None and layer.weight1.is_meta:
            raise ValueError(f"device is None and {name or 'module'} is on the meta device; give the device to load to")
        if weights == "codes" or (weights == "packed" and layer.recipe.stateful):
            _check_recipe(name, layer)
    source = Source(Path(path))
    places = {name: find(source, path_of(name, prefix), layer, names, experts) for name, layer in found.items()}
    source.open_files_of({one for pair in places.values() for matrices in pair for one in matrices.tensors()})
    changed: dict[str, int] = {}
    loaded: dict[tuple[str, str], Tensor] = {}
    for name, layer in found.items():
        for number, matrices in enumerate(places[name]):
            weight, bias = f"weight{number + 1}", f"bias{number + 1}"
            target = _Weight(layer, weight, number, name_in(name, weight), device)
            if weights == "codes":
                value, rounded = target.codes(matrices)
            elif weights == "packed":
                value, rounded = target.packed(matrices)
            else:
                value, rounded = target.values(matrices)
            if exact and rounded.counts:
                raise ValueError(rounded.refusal(weights))
            changed |= rounded.counts
            loaded[name, weight] = value
            bias_value = target.bias(matrices.bias())
            if bias_value is not None:
                loaded[name, bias] = bias_value
    for (name, parameter), value in loaded.items():
        _put(found[name], parameter, value)
    return changed


def _put(layer: Experts, name: str, value: Tensor) -> None:
    """Write `value` into the present parameter, which an optimizer may hold; replace that by a new one where the two
    are different kinds of weights or on different devices."""
    old = layer._parameters[name]
    assert old is not None
    kinds = {type(one) for one in (old, value) if isinstance(one, CodedWeight | PackedWeight)}
    if old.device == value.device and not kinds:
        old.copy_(value)
    elif old.device == value.device and isinstance(old, CodedWeight) and isinstance(value, CodedWeight):
        write_into(old, value)
    else:
        trained = old.requires_grad and not isinstance(value, PackedWeight)
        layer._parameters[name] = nn.Parameter(value, requires_grad=trained)


class _Rounded:
    """Planes of a weight that do not hold the file's values.

    counts    by plane, how many elements have another value than the file's
    reasons   by plane, why
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def add(self, plane: str, changed: int, reason: str) -> None:
        """Count `changed` more elements of `plane`; nothing for 0."""
        if changed:
            self.counts[plane] = self.counts.get(plane, 0) + changed
            self.reasons[plane] = reason

    def add_misfits(self, name: str, misfits: Sequence[Misfit]) -> None:
        """Count what `Planes.write` has found in the planes of the weight called `name`."""
        for misfit in misfits:
            self.add(f"{name}.{misfit.plane}", misfit.changed, misfit.reason)

    def refusal(self, weights: str) -> str:
        """The message for a caller who wants exact values and loads weights in this form."""
        name, count = next(iter(self.counts.items()))
        other = "a recipe or dtype that holds them, load weights='values'"
        if weights == "values":
            other = "dtype=torch.float32, which holds them"
        return (
            f"{name} does not hold the file's values: {count} elements would be others, because {self.reasons[name]}; "
            f"create the module with {other}, or give exact=False to round them"
        )


class _Weight:
    """One weight of a module, as which a file's matrices are loaded."""

    def __init__(
        self, layer: Experts, parameter: str, number: int, name: str, device: torch.device | str | None
    ) -> None:
        own = layer._parameters[parameter]
        assert own is not None
        self.layer, self.number, self.name = layer, number, name
        self.shape, self.dtype = own.shape, own.dtype
        self.device = own.device if device is None else torch.device(device)
        self.interleave = interleave_of(layer, number)

    def codes(self, matrices: Matrices) -> tuple[Tensor, _Rounded]:
        """A CodedWeight of the file's codes."""
        spec = self.layer.recipe.quantizer("w")
        assert spec is not None  # the recipe has been checked
        planes = Planes(
            GroupedTensorSpec(shape=tuple(self.shape), groups=self.shape[0], quantizer=spec, ragged_axis=None),
            self.device,
        )
        rounded = _Rounded()
        for group in range(self.shape[0]):
            rounded.add_misfits(self.name, planes.write(group, matrices.blocks(group, self.device)))
        return weight_of(self.layer, planes.tensor(), self.dtype, self.number), rounded

    def packed(self, matrices: Matrices) -> tuple[Tensor, _Rounded]:
        """A PackedWeight of the file's MXFP4. Counted is what each call would round when it expands that: to the
        recipe's codes, or to the weight's dtype."""
        groups, rows, columns = self.shape
        packed = torch.empty(groups, rows, columns // 2, dtype=torch.uint8, device=self.device)
        scales = torch.empty(groups, rows, -(-columns // MXFP4[1]), dtype=torch.uint8, device=self.device)
        spec = self.layer.recipe.quantizer("w") if self.layer.recipe.quantizes("fprop") else None
        rounded = _Rounded()
        for group in range(groups):
            blocks = matrices.blocks(group, self.device)
            if blocks.block != MXFP4 or blocks.codes.dtype is not torch.uint8 or blocks.scale.dtype is not torch.uint8:
                raise ValueError(
                    f"weights is 'packed' and the file's {self.name} is not MXFP4; load it as 'codes' or 'values'"
                )
            packed[group], scales[group] = pack(blocks.codes), blocks.scale
            if spec is None:
                changed = int((blocks.values() != blocks.values().to(self.dtype)).sum())
                rounded.add(self.name, changed, self._is_shorter())
            else:
                one = GroupedTensorSpec(shape=(1, rows, columns), groups=1, quantizer=spec, ragged_axis=None)
                rounded.add_misfits(self.name, Planes(one, self.device).write(0, blocks))
        return PackedWeight(packed, scales, self.layer.recipe, self.dtype, self.interleave), rounded

    def values(self, matrices: Matrices) -> tuple[Tensor, _Rounded]:
        """The file's values in the weight's dtype."""
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        rounded = _Rounded()
        for group in range(self.shape[0]):
            values = matrices.blocks(group, self.device).values()
            weight[group] = values
            rounded.add(self.name, int((weight[group] != values).sum()), self._is_shorter())
        return (from_halves(weight, self.interleave) if self.interleave else weight), rounded

    def _is_shorter(self) -> str:
        return f"{name_of(self.dtype)} is shorter than they are"

    def bias(self, value: Tensor | None) -> Tensor | None:
        """The file's bias in the module's dtype and order; ValueError where one of the two has none."""
        own = self.layer._parameters.get(f"bias{self.number + 1}")
        if (value is None) is not (own is None):
            there, here = ("no bias", "a bias") if value is None else ("a bias", "no bias")
            raise ValueError(f"{self.name} has {there} in the file and {here} in the module; create it like the file")
        if value is None or own is None:
            return None
        cast = value.to(self.device, own.dtype)
        if not torch.equal(cast.to(value.dtype), value.to(self.device)):
            raise ValueError(
                f"the bias of {self.name} is {name_of(value.dtype)} in the file and {name_of(own.dtype)} here, which "
                "does not hold it; create the module with the file's dtype"
            )
        return from_halves(cast, self.interleave) if self.interleave else cast


def _check_options(prefix: object, names: Sequence[str] | None, weights: object, exact: object) -> None:
    if not isinstance(prefix, str):
        raise ValueError(f"prefix is {brief(prefix)}; give a str, such as 'model.'")
    if names is not None:
        check_names(names)
    one_of("weights", weights, ("codes", "values", "packed"))
    check_flag("exact", exact)


def experts_of(module: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The modules with experts, by their names in the state dict; ValueError where there is none, and for weights that
    are in parts."""
    found = False
    for name, layer in saved_modules(module):
        if not isinstance(layer, Experts):
            continue
        found = True
        for parameter in ("weight1", "weight2", "bias1", "bias2"):
            own = layer._parameters.get(parameter)
            full = name_in(name, parameter)
            if parameter in layer._shapes and layer.is_per_group(parameter):
                raise ValueError(
                    f"{full} is one parameter per group; create the module with per_group_parameters=False"
                )
            if own is None:
                continue
            if isinstance(own, DTensor):
                raise ValueError(f"{full} is sharded; give the module before it is sharded")
        yield name, layer
    if not found:
        raise ValueError("module has no GroupedMLP and no MoE; give one that has, such as the whole model")


def _check_parameters(name: str, layer: Experts) -> None:
    """ValueError for a weight or a bias that is computed, which loading would not change."""
    for parameter in layer._shapes:
        if layer._parameters.get(parameter) is None:
            raise ValueError(
                f"{name_in(name, parameter)} is not a parameter of its module: a parametrization or pruning computes "
                "it; remove that first, or load before it is added"
            )


def _check_recipe(name: str, layer: Experts) -> None:
    recipe = layer.recipe
    if recipe.stateful or not recipe.quantizes("fprop"):
        why = "takes its scales from earlier steps" if recipe.stateful else "reads values in fprop"
        raise ValueError(
            f"the recipe of {name or 'module'} is {recipe.kind}, which {why}; create the module with another, such as "
            "'fp8-block', or load weights='values'"
        )
