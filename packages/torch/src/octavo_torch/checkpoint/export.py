"""export_experts and expert_tensors: experts in the layouts that inference engines and other libraries read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from octavo import QuantizerSpec
from octavo.errors import one_of, shown
from octavo_registry.contract.cards import GATED
from octavo_torch.arrays.checks import brief, check_module, check_path
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch.checkpoint.codes import check_not_packed, codes_of, interleave_of
from octavo_torch.checkpoint.expert_ranks import numbers_of, ranks_of
from octavo_torch.checkpoint.experts import GATED_NAMES, UNGATED_NAMES, check_first, check_names
from octavo_torch.checkpoint.formats.layouts import Layout
from octavo_torch.checkpoint.formats.places import LAYOUTS, STACKED, path_of
from octavo_torch.checkpoint.formats.planes import blocks_of
from octavo_torch.checkpoint.formats.writer import Writer
from octavo_torch.checkpoint.load import experts_of
from octavo_torch.checkpoint.recipes import recipes_json
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.mlp.experts import Experts

Named = tuple[str, Tensor]
LayoutName = Literal["hf-fp8", "compressed-tensors", "compressed-tensors-mxfp4", "gpt-oss-mxfp4", "modelopt-nvfp4"]


def expert_tensors(
    module: nn.Module,
    layout: LayoutName,
    *,
    prefix: str = "",
    names: Sequence[str] | None = None,
    first: int | None = None,
) -> Iterator[Named]:
    """Name and tensor of everything that `export_experts` would write, as copies, to update an engine's weights with.

    layout   of names, codes and scales: "hf-fp8", "compressed-tensors", "compressed-tensors-mxfp4", "gpt-oss-mxfp4" or
             "modelopt-nvfp4"
    prefix   what the written names have before the module's, such as "model."
    names    (gate, up, down), or (up, down) of experts without a gate; None: gate_proj, up_proj, down_proj
    first    the number of the first expert, where a rank has some of them; "gpt-oss-mxfp4" takes all in one tensor.
             None: 0, and of a MoE with `ep` the number that this rank's first expert has among all

    The codes are those that the next forward reads, whether the weights are codes or values. Raises ValueError at once
    for a recipe whose codes the layout does not hold; and when it reaches a weight, for values that MXFP4 does not.
    """
    return _tensors(_Export(module, layout, prefix, names, first))


@torch.no_grad()
def export_experts(
    module: nn.Module,
    folder: str | Path,
    layout: LayoutName,
    *,
    prefix: str = "",
    names: Sequence[str] | None = None,
    first: int | None = None,
    others: Mapping[str, Tensor] | None = None,
    config: Mapping[str, object] | None = None,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write the experts of `module` to safetensors files with an index, and config.json with a quantization_config.

    folder          new, or without such files
    layout, prefix, names, first   as expert_tensors has them
    others          tensors that are written as they are, under their names, such as attention's; quantization_config
                    says that the modules of their matrices are not quantized
    config          what else config.json is to hold: the model's configuration
    shard_bytes     largest size of a file; a tensor that is larger has a file of its own

    Each file's metadata has the recipe of every layer and its fingerprint, as JSON. Needs the package safetensors. The
    files get their names when all are complete. Raises ValueError as expert_tensors does, and for other arguments.
    """
    check_path("folder", folder)
    export = _Export(module, layout, prefix, names, first)
    others = _checked_others(others)
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ValueError(f"shard_bytes is {brief(shard_bytes)}; give a number of bytes, at least 1")
    if config is not None and (not isinstance(config, Mapping) or "quantization_config" in config):
        raise ValueError(
            f"config is {brief(config)}; give a mapping without quantization_config, such as a model's configuration"
        )
    plain = sorted(name[: -len(".weight")] for name, value in others.items() if _is_matrix(name, value))
    quantization = export.layout.config(export.spec, plain)
    recipes = {"layout": export.layout.name, "recipes": json.loads(recipes_json(module))}
    writer = Writer(Path(folder), recipes, shard_bytes)
    writer.write(chain(_tensors(export), others.items()), {**(config or {})}, quantization)


class _Export:
    """Checked arguments of an export."""

    def __init__(
        self, module: nn.Module, layout: str, prefix: str, names: Sequence[str] | None, first: int | None
    ) -> None:
        check_module(module)
        one_of("layout", layout, tuple(LAYOUTS))
        if not isinstance(prefix, str):
            raise ValueError(f"prefix is {brief(prefix)}; give a str, such as 'model.'")
        if first is not None:
            check_first(first)
        self.layout: Layout = LAYOUTS[layout]
        self.first, self.prefix = first, prefix
        if self.layout.stacked and (first or names is not None):
            given = "names" if names is not None else "first"
            raise ValueError(f"{given} is given and {layout} has all experts under fixed names; leave it out")
        check_not_packed(module)
        self.found = dict(experts_of(module))
        self.names: dict[str, tuple[str, ...]] = {}
        specs = set()
        for name, layer in self.found.items():
            specs.add(_spec_of(name, layer, self.layout))
            self.names[name] = _names_of(name, layer, self.layout, names)
        if len(specs) > 1:
            raise ValueError(
                "module has experts of several recipes, and a folder is of one layout; export each by itself"
            )
        self.spec: QuantizerSpec = specs.pop()


def _spec_of(name: str, layer: Experts, layout: Layout) -> QuantizerSpec:
    spec = layer.recipe.quantizer("w") if layer.recipe.quantizes("fprop") else None
    needed = "weights that are quantized" if spec is None else layout.refuses(spec)
    if spec is None or needed is not None:
        instead = "write its values with octavo_torch.unstack_experts" if spec is None else "take another layout"
        raise ValueError(
            f"the recipe of {name or 'module'} is {layer.recipe.kind}, and layout {layout.name} holds {needed}; "
            f"{instead}, or give the module another recipe with octavo_torch.convert"
        )
    if layer.weight1.is_meta:
        raise ValueError(f"{name or 'module'} is on the meta device and has no values; give one with memory")
    return spec


def _names_of(name: str, layer: Experts, layout: Layout, names: Sequence[str] | None) -> tuple[str, ...]:
    gated = layer.activation in GATED
    if layout.stacked:
        if ranks_of(layer) is not None:
            raise ValueError(
                f"{name or 'module'} has some of the experts, and layout {layout.name} has all in one tensor; take "
                "another layout, or gather the experts into a module without ep"
            )
        if not gated:
            raise ValueError(f"{name or 'module'} has no gate, and layout {layout.name} has; take another layout")
        return STACKED
    if names is None:
        return GATED_NAMES if gated else UNGATED_NAMES
    check_names(names)
    chosen = tuple(names)
    if (len(chosen) == 3) is not gated:
        raise ValueError(
            f"names is {list(chosen)} and {name or 'module'} has activation {layer.activation}; give a name for each "
            f"of its {3 if gated else 2} projections"
        )
    return chosen


@torch.no_grad()
def _tensors(export: _Export) -> Iterator[Named]:
    layout = export.layout
    for name, layer in export.found.items():
        path, names = path_of(name, export.prefix), export.names[name]
        for number, parts in enumerate((names[:1] if layout.stacked else names[:-1], names[-1:])):
            weight = layer.of_all_groups(f"weight{number + 1}")
            assert isinstance(weight, Tensor)  # experts_of has refused others
            codes = codes_of(layer, weight, number)
            assert codes is not None  # of a recipe that has been checked
            bias = _bias(layer, number)
            if layout.stacked:
                yield from _stacked(layout, f"{path}.{parts[0]}", codes, bias, alternate=number == 0)
            else:
                yield from _per_expert(layout, path, parts, codes, bias, _first_of(layer, export.first))


def _first_of(layer: Experts, given: int | None) -> int:
    """The number of a layer's first expert."""
    return numbers_of(layer).start if given is None else given


def _bias(layer: Experts, number: int) -> Tensor | None:
    """[G, N], in halves."""
    bias = layer.of_all_groups(f"bias{number + 1}")
    if not isinstance(bias, Tensor):
        return None
    block = interleave_of(layer, number)
    return to_halves(bias, block) if block else bias


def _per_expert(
    layout: Layout, path: str, parts: Sequence[str], codes: GroupedTensor, bias: Tensor | None, first: int
) -> Iterator[Named]:
    """Tensors of each projection of each expert."""
    rows = codes.shape[1] // len(parts)
    for group in range(codes.shape[0]):
        whole = blocks_of(codes, group)
        for index, part in enumerate(parts):
            name, start = f"{path}.{first + group}.{part}", index * rows
            tensors = layout.write(name, whole.rows(start, start + rows), codes.spec.quantizer)
            if bias is not None:
                tensors["bias"] = bias[group, start : start + rows]
            for kind, tensor in tensors.items():
                yield f"{name}.{kind}", tensor.detach().clone()


def _stacked(
    layout: Layout, name: str, codes: GroupedTensor, bias: Tensor | None, *, alternate: bool
) -> Iterator[Named]:
    """Tensors of all experts, gate and up rows in turns."""
    written = [layout.write(name, blocks_of(codes, group), codes.spec.quantizer) for group in range(codes.shape[0])]
    tensors = {kind: torch.stack([one[kind] for one in written]) for kind in layout.kinds}
    if bias is not None:
        tensors["bias"] = bias.detach().clone()
    for kind, tensor in tensors.items():
        yield f"{name}{layout.joint}{kind}", from_halves(tensor, 1) if alternate else tensor


def _is_matrix(name: str, value: Tensor) -> bool:
    return name.endswith(".weight") and value.dim() == 2


def _checked_others(others: object) -> dict[str, Tensor]:
    if others is not None and not isinstance(others, Mapping):
        raise ValueError(f"others is {brief(others)}; give a mapping of names to tensors")
    checked = dict(others or {})
    for name, value in checked.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_meta or not is_plain(value):
            raise ValueError(f"others has {shown(name)}: {brief(value)}; give tensors with memory, under their names")
    return checked
