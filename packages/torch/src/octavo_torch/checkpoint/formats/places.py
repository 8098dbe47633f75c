"""Finds a module's experts in files by the names of their tensors, and reads their matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import shown
from octavo_registry.contract.cards import GATED
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.arrays.per_group import concatenated, stacked
from octavo_torch.checkpoint.expert_ranks import numbers_of, ranks_of
from octavo_torch.checkpoint.experts import Expert, chosen_experts, projections_of
from octavo_torch.checkpoint.formats.blocks import Blocks, join
from octavo_torch.checkpoint.formats.fp4 import CompressedMxfp4, GptOssMxfp4, ModelOptNvfp4
from octavo_torch.checkpoint.formats.fp8 import CompressedTensors, HuggingFaceFp8
from octavo_torch.checkpoint.formats.layouts import Layout
from octavo_torch.checkpoint.formats.source import Source
from octavo_torch.mlp.experts import Experts

LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (HuggingFaceFp8(), CompressedTensors(), CompressedMxfp4(), GptOssMxfp4(), ModelOptNvfp4())
}
_BY_KIND = (
    (".weight_scale_inv", "hf-fp8"),
    (".weight_scale_2", "modelopt-nvfp4"),
    (".weight_packed", "compressed-tensors-mxfp4"),
    (".weight_scale", "compressed-tensors"),
    ("_blocks", "gpt-oss-mxfp4"),
)
_OF_AN_EXPERT = re.compile(r"(?P<number>0|[1-9][0-9]{0,5})\.(?P<name>.+)\.(?P<kind>[^.]+)")
_MOST_EXPERTS = 10**6
STACKED = ("gate_up_proj", "down_proj")
"""The matrices of a layout that has all experts in one tensor."""


def path_of(name: str, prefix: str) -> str:
    """Path of a module's experts in files: `prefix` and its name, which ends in "experts"."""
    full = (prefix + name).removesuffix(".")
    if full.rpartition(".")[2] == "experts":
        return full
    return f"{full}.experts" if full else "experts"


def layout_of(path: str, rests: Sequence[str]) -> Layout:
    """The layout of the tensors under `path`; ValueError where none of them says which."""
    for end, name in _BY_KIND:
        if any(rest.endswith(end) for rest in rests):
            return LAYOUTS[name]
    raise ValueError(
        f"{path} has {shown(rests[0])} and {len(rests) - 1} others, which are of no known layout "
        f"({', '.join(LAYOUTS)}); give files of one, or load values with octavo_torch.stack_experts"
    )


@dataclass(frozen=True)
class Place:
    """A tensor, or element `index` of its first axis."""

    name: str
    index: int | None = None

    def read(self, source: Source) -> Tensor:
        """The tensor, in host memory."""
        return source.tensor(self.name) if self.index is None else source.slice(self.name, self.index)


@dataclass(frozen=True)
class Part:
    """A matrix by itself: the name that errors have for it, its shape in the module, its tensors and its bias."""

    name: str
    shape: tuple[int, int]
    tensors: Mapping[str, Place]
    bias: Place | None


@dataclass(frozen=True)
class Matrices:
    """One layer's matrices of a module's experts, in halves: the gate's rows first.

    parts       for each expert the matrices that make up its one, such as gate and up projection
    alternate   gate and up rows take turns in the file
    """

    source: Source
    layout: Layout
    parts: tuple[tuple[Part, ...], ...]
    alternate: bool

    def blocks(self, group: int, device: torch.device) -> Blocks:
        """A group's matrix; ValueError where tensors do not fit each other or the module."""
        read = []
        for part in self.parts[group]:
            tensors = {kind: place.read(self.source).to(device) for kind, place in part.tensors.items()}
            one = self.layout.read(part.name, tensors)
            if one.codes.shape != part.shape:
                raise ValueError(
                    f"{part.name} is {list(one.codes.shape)} in the file and the module needs {list(part.shape)}; "
                    "create the module with the file's sides"
                )
            read.append(one)
        whole = join(read)
        return whole.alternate() if self.alternate else whole

    def bias(self) -> Tensor | None:
        """[G, N] as the file has it, in halves; None where it has none."""
        rows = []
        for parts in self.parts:
            found = [(part, part.bias.read(self.source)) for part in parts if part.bias is not None]
            for part, value in found:
                if tuple(value.shape) != part.shape[:1] or not value.is_floating_point() or value.element_size() == 1:
                    raise ValueError(
                        f"the bias of {part.name} is {brief(value)} in the file; give floats {list(part.shape[:1])}"
                    )
                if not bool(value.isfinite().all()):
                    raise ValueError(f"the bias of {part.name} is not finite in the file; give a file of finite values")
            if found:
                rows.append(concatenated([value for _, value in found]))
        if not rows:
            return None
        whole = stacked(rows)
        return to_halves(whole, 1) if self.alternate else whole

    def tensors(self) -> set[str]:
        """The names of all tensors that will be read."""
        places = (place for parts in self.parts for part in parts for place in (*part.tensors.values(), part.bias))
        return {place.name for place in places if place is not None}


def find(
    source: Source, path: str, module: Experts, names: Sequence[str] | None, experts: Sequence[int] | None
) -> tuple[Matrices, Matrices]:
    """Both layers' matrices of a module; ValueError where tensors are missing, are too many or are unknown."""
    rests = source.under(path)
    if not rests:
        raise ValueError(
            f"{source.path} has no tensors under {path!r}; give the prefix that its names have before the module's"
        )
    layout = layout_of(path, rests)
    if source.config is not None:
        layout.check(source.config)
    gated = module.activation in GATED
    hidden = module.hidden_features
    first, second = (hidden, module.in_features), (module.out_features, hidden)
    if layout.stacked:
        if not gated or names is not None:
            raise ValueError(
                f"{path} is of layout {layout.name}, whose experts have gates and names of their own; give a module "
                "with a gate, and leave names out"
            )
        shapes = (2 * hidden, first[1]), second
        return _stacked(source, layout, path, rests, shapes, _ChosenExperts(module, experts))
    by_number = _by_number(path, layout, rests)
    chosen = _ChosenExperts(module, experts).chosen(path, by_number)
    own = projections_of(path, {"weight": by_number[chosen[0]].get(layout.kinds[0], {})}, names)
    if (len(own) == 3) is not gated:
        raise ValueError(
            f"{path} has projections {', '.join(own)} and the module's activation is {module.activation}; create it "
            f"{'with' if len(own) == 3 else 'without'} a gate"
        )
    kinds = (*layout.kinds, "bias") if "bias" in by_number[chosen[0]] else layout.kinds
    for number in chosen:
        _check_whole(f"{path}.{number}", by_number[number], kinds, own)

    def matrices(names: Sequence[str], shape: tuple[int, int]) -> Matrices:
        parts = tuple(
            tuple(_part(f"{path}.{number}", by_number[number], kinds, name, shape) for name in names)
            for number in chosen
        )
        return Matrices(source, layout, parts, alternate=False)

    return matrices(own[:-1], first), matrices(own[-1:], second)


@dataclass(frozen=True)
class _ChosenExperts:
    """The experts of a file that a module takes: those of these numbers; None: all, of a MoE with `ep` this rank's."""

    module: Experts
    numbers: Sequence[int] | None

    def chosen(self, path: str, there: Mapping[int, Expert]) -> list[int]:
        """Their numbers, all of which `there` has; ValueError where it lacks one, or the module has another number of
        experts."""
        numbers, group = self.numbers, ranks_of(self.module)
        if numbers is None and group is not None:
            numbers, of_all = numbers_of(self.module), group.ranks * self.module.num_groups
            if max(there) >= of_all:
                raise ValueError(
                    f"{path} has experts up to number {max(there)}, and the {group.ranks} ranks of ep= have {of_all}; "
                    "create the module with as many, or give the numbers of this rank's as experts"
                )
        chosen = chosen_experts(path, there, numbers)
        if len(chosen) != self.module.num_groups:
            raise ValueError(
                f"{path} has {len(chosen)} experts to load and the module {self.module.num_groups}; give experts as "
                "many numbers as it has, or create it with as many"
            )
        return chosen


def _by_number(path: str, layout: Layout, rests: Sequence[str]) -> dict[int, Expert]:
    by_number: dict[int, Expert] = {}
    for rest in rests:
        found = _OF_AN_EXPERT.fullmatch(rest)
        if found is None or found["kind"] not in (*layout.kinds, *layout.ignored, "bias"):
            raise ValueError(
                f"{shown(f'{path}.{rest}')} is unknown in files of {layout.name}; give a file of experts with "
                f"{', '.join(layout.kinds)}"
            )
        expert = by_number.setdefault(int(found["number"]), {})
        expert.setdefault(found["kind"], {})[found["name"]] = f"{path}.{rest}"
    return by_number


def _check_whole(path: str, expert: Expert, kinds: Sequence[str], names: Sequence[str]) -> None:
    """ValueError unless an expert has these kinds of tensors of these projections, and no others."""
    for kind in (*kinds, "bias"):
        have, need = {*expert.get(kind, {})}, {*names} if kind in kinds else set()
        for name in sorted(have ^ need):
            state = "missing" if name in need else "not in every expert"
            raise ValueError(
                f"{shown(f'{path}.{name}.{kind}')} is {state}; give files with equal tensors of each expert"
            )


def _part(path: str, expert: Expert, kinds: Sequence[str], name: str, shape: tuple[int, int]) -> Part:
    places = {kind: Place(expert[kind][name]) for kind in kinds}
    return Part(f"{path}.{name}", shape, places, places.pop("bias", None))


def _stacked(
    source: Source,
    layout: Layout,
    path: str,
    rests: Sequence[str],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    experts: _ChosenExperts,
) -> tuple[Matrices, Matrices]:
    biases = [f"{name}_bias" for name in STACKED]
    needed = {name + layout.joint + kind for name in STACKED for kind in layout.kinds}
    needed |= {*biases} if {*rests} & {*biases} else set()
    for rest in sorted(needed ^ {*rests}):
        state = "missing" if rest in needed else f"unknown in files of {layout.name}"
        raise ValueError(f"{shown(f'{path}.{rest}')} is {state}; give a file with {', '.join(sorted(needed))}")
    count = {source.shape(f"{path}.{rest}")[:1] for rest in rests}
    if len(count) != 1 or () in count or not 0 < max(count)[0] <= _MOST_EXPERTS:
        raise ValueError(f"{path} has tensors of {sorted(count)} experts; give files with the same experts in each")
    chosen = experts.chosen(path, {number: {} for number in range(max(count)[0])})
    result = []
    for name, bias, shape in zip(STACKED, biases, shapes, strict=True):
        full = {kind: f"{path}.{name}{layout.joint}{kind}" for kind in layout.kinds}
        parts = []
        for number in chosen:
            own = {kind: Place(one, number) for kind, one in full.items()}
            own_bias = Place(f"{path}.{bias}", number) if bias in needed else None
            parts.append((Part(f"{path}.{name}", shape, own, own_bias),))
        result.append(Matrices(source, layout, tuple(parts), name == STACKED[0]))
    return result[0], result[1]
