"""State dicts of experts that are modules of their own: stacked as GroupedMLP has them, and taken apart again.

A model of Hugging Face's format stores `experts.0.w1.weight`, `experts.0.w3.weight`, `experts.0.w2.weight` and so on,
each [out, in] as torch.nn.Linear has it; GroupedMLP has `experts.weight1` [G, 2 F, K] and `experts.weight2` [G, N, F].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch.arrays.per_group import concatenated, stacked

_OF_AN_EXPERT = re.compile(r"(?P<path>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<name>.+)\.(?P<kind>[^.]+)")
_STACKED = re.compile(r"(?P<path>(?:.*\.)?experts)\.(?P<kind>weight|bias)1")
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Gate, up and down projection of DeepSeek, Qwen, OLMoE and others; the names that experts are written with."""
UNGATED_NAMES = ("up_proj", "down_proj")
"""The same of experts without a gate."""
KNOWN_NAMES = (("w1", "w3", "w2"), GATED_NAMES, UNGATED_NAMES, ("fc1", "fc2"))
"""The names that are recognized; the first are Mixtral's."""
_KINDS = ("weight", "bias")

Expert = dict[str, dict[str, str]]
"""Kind -> projection -> the key of the state dict."""


def stack_experts(
    state_dict: Mapping[str, Tensor],
    *,
    names: Sequence[str] | None = None,
    experts: Sequence[int] | None = None,
    interleave: int | None = None,
) -> dict[str, Tensor]:
    """A state dict with the experts of each module list `experts` stacked into the parameters of one GroupedMLP.

    state_dict   keys "<path>experts.<number>.<projection>.weight" [out, in], and ".bias" [out] where there are biases;
                 a mapping that reads a tensor when it is asked for is read one list of experts at a time
    names        (gate, up, down), or (up, down) of experts without a gate; None: recognized if they are Mixtral's
                 (w1, w3, w2), (gate_proj, up_proj, down_proj), (up_proj, down_proj) or (fc1, fc2)
    experts      the numbers of the experts to stack, such as range(8, 16) of a rank; None: all
    interleave   that of the GroupedMLP which will load the result; None: the gate half first

    The result has "<path>experts.weight1" [G, 2 F, K], the gate half first, or [G, F, K], "<path>experts.weight2"
    [G, N, F], and "bias1" and "bias2"; other entries are those of `state_dict`. Put a GroupedMLP in the list's place,
    with or without `per_group_parameters`, and load it.

    Raises ValueError where there are no experts, one is missing, projections are unknown or do not fit each other, and
    for quantized weights.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict is {brief(state_dict)}; give a mapping of names to tensors")
    if names is not None:
        check_names(names)
    lists: dict[str, dict[int, Expert]] = {}
    others: list[str] = []
    for key in state_dict:
        found = _OF_AN_EXPERT.fullmatch(key)
        if found is None:
            others.append(key)
            continue
        if found["kind"] not in _KINDS:
            raise ValueError(
                f"state_dict has {key!r}; experts with a weight and a bias can be stacked: dequantize the others first"
            )
        expert = lists.setdefault(found["path"], {}).setdefault(int(found["number"]), {})
        expert.setdefault(found["kind"], {})[found["name"]] = key
    if not lists:
        raise ValueError("state_dict has no experts; give one with keys such as 'experts.0.w1.weight'")
    result = {key: state_dict[key] for key in others}
    for path, by_number in lists.items():
        chosen = chosen_experts(path, by_number, experts)
        projections = projections_of(path, by_number[chosen[0]], names)
        for kind in _KINDS if "bias" in by_number[chosen[0]] else _KINDS[:1]:
            first, second = (
                _stacked([_joined(state_dict, path, number, by_number[number], kind, part) for number in chosen], path)
                for part in (projections[:-1], projections[-1:])
            )
            half = first.shape[1] // 2
            if interleave is not None and len(projections) == 3:
                _check_block(path, interleave, half)
                first = from_halves(first, interleave)
            result |= {f"{path}.{kind}1": first, f"{path}.{kind}2": second}
    return result


def unstack_experts(
    state_dict: Mapping[str, Tensor],
    names: Sequence[str] = GATED_NAMES,
    *,
    first: int = 0,
    interleave: int | None = None,
) -> dict[str, Tensor]:
    """The inverse of stack_experts: each expert's projections under their own names, as copies.

    state_dict   of a model whose modules named `experts` are GroupedMLP
    names        (gate, up, down), or (up, down) of experts without a gate
    first        the number of the first expert, where a rank has some of them
    interleave   that of the GroupedMLP

    Buffers of a recipe's state (amax_history, encode_scale and seeds) are left out. Raises ValueError where there are
    no stacked experts and where gate and up projection are not halves.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict is {brief(state_dict)}; give a mapping of names to tensors")
    check_names(names)
    check_first(first)
    paths = [found["path"] for key in state_dict if (found := _STACKED.fullmatch(key))]
    if not paths:
        raise ValueError("state_dict has no stacked experts; give one with keys such as 'experts.weight1'")
    own = tuple(f"{path}." for path in paths)
    result = {key: value for key, value in state_dict.items() if not key.startswith(own)}
    for path in dict.fromkeys(paths):
        for kind in _KINDS:
            if f"{path}.{kind}1" not in state_dict:
                continue
            parts = [state_dict[f"{path}.{kind}1"], state_dict[f"{path}.{kind}2"]]
            if len(names) == 3:
                rows = parts[0].shape[1]
                if rows % 2:
                    raise ValueError(f"{path}.{kind}1 has {rows} rows; a gate needs an even number, or give two names")
                if interleave is not None:
                    _check_block(path, interleave, rows // 2)
                    parts[0] = to_halves(parts[0], interleave)
                parts[:1] = parts[0].chunk(2, dim=1)
            for name, part in zip(names, parts, strict=True):
                for number, value in enumerate(part.unbind(0), start=first):
                    result[f"{path}.{number}.{name}.{kind}"] = value.clone()
    return result


def check_names(names: object) -> None:
    """Raises ValueError for anything but (gate, up, down) and (up, down)."""
    given = list(names) if isinstance(names, tuple | list) else []
    if len(given) not in (2, 3) or not all(isinstance(name, str) for name in given) or len({*given}) != len(given):
        raise ValueError(
            f"names is {given or brief(names)}; give (gate, up, down), or (up, down) of experts without a gate"
        )


def check_first(first: object) -> None:
    """Raises ValueError for anything but the number of an expert."""
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"first is {brief(first)}; give the number of an expert, 0 or more")


def _check_block(path: str, interleave: object, half: int) -> None:
    whole = isinstance(interleave, int) and not isinstance(interleave, bool) and interleave > 0
    if not whole or half % interleave:  # type: ignore[operator]
        raise ValueError(f"interleave is {brief(interleave)} and {path} has {half} gate rows; give a divisor of {half}")


def chosen_experts(path: str, by_number: Mapping[int, Expert], experts: Sequence[int] | None) -> list[int]:
    """The numbers of the experts to stack, all of which are there."""
    given = range(max(by_number) + 1) if experts is None else experts
    if not isinstance(given, range | tuple | list) or not given or not all(isinstance(one, int) for one in given):
        raise ValueError(f"experts is {brief(experts)}; give the numbers of experts, such as range(8), or None")
    chosen = list(given)
    missing = [number for number in chosen if number not in by_number]
    if missing:
        raise ValueError(
            f"{path} has {len(by_number)} experts, up to number {max(by_number)}, and not {missing[0]}; give the state "
            "dict of all of them, or the numbers of those that are there as experts"
        )
    return chosen


def projections_of(path: str, expert: Expert, names: Sequence[str] | None) -> tuple[str, ...]:
    """(gate, up, down) or (up, down): the caller's names, or the known ones that are this expert's."""
    own = {*expert.get("weight", {})}
    candidates = KNOWN_NAMES if names is None else (tuple(names),)
    for candidate in candidates:
        if own == {*candidate}:
            return candidate
    wanted = "; known names are " + ", ".join(map(str, KNOWN_NAMES)) if names is None else f"; names is {tuple(names)}"
    raise ValueError(f"experts of {path} have weights {', '.join(sorted(own)) or 'none'}{wanted}; give theirs as names")


def _joined(
    state_dict: Mapping[str, Tensor], path: str, number: int, expert: Expert, kind: str, names: Sequence[str]
) -> Tensor:
    """One expert's projections `names`, one after the other."""
    missing = [name for name in names if name not in expert.get(kind, {})]
    if missing:
        raise ValueError(f"{path}.{number} has no {missing[0]}.{kind}, which other experts have; give all of them")
    parts = [state_dict[expert[kind][name]] for name in names]
    for name, part in zip(names, parts, strict=True):
        shape, key = list(part.shape), expert[kind][name]
        if part.is_floating_point() and part.element_size() == 1:
            raise ValueError(f"{key} is {brief(part)}, quantized; dequantize it first")
        if part.dim() != (2 if kind == "weight" else 1) or shape != list(parts[0].shape):
            raise ValueError(
                f"{key} has shape {shape} and {names[0]}.{kind} of it {list(parts[0].shape)}; give equal ones"
            )
    return concatenated(parts)


def _stacked(values: list[Tensor], path: str) -> Tensor:
    for value in values:
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise ValueError(f"experts of {path} have {brief(values[0])} and {brief(value)}; give equal ones")
    return stacked(values)
