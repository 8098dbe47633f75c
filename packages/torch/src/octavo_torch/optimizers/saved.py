"""A saved state of an optimizer, checked before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from octavo_torch.arrays.checks import brief
from octavo_torch.optimizers.group import MASTER_DTYPES, OPTIONS, UNSERVED, Group, check_group
from octavo_torch.optimizers.state import State, checked_entry
from octavo_torch.optimizers.stepping import Member

_OF_TORCH = (*UNSERVED, "foreach", "fused", "decoupled_weight_decay")
"""Options of torch.optim.AdamW's groups that this optimizer ignores."""


def checked_state_dict(
    state_dict: object, present: Sequence[Group], members: Iterable[Member], state_of: Callable[[Member], State]
) -> tuple[list[dict[str, Any]], list[State | None]]:
    """The groups of `state_dict` with our options, and a state or None for each parameter.

    present   the optimizer's groups
    state_of  a member's state, or a new one like it
    Raises ValueError for one that does not fit.
    """
    parts = state_dict if isinstance(state_dict, Mapping) else {}
    saved, entries = parts.get("param_groups"), parts.get("state")
    if not isinstance(saved, list) or not isinstance(entries, Mapping):
        raise ValueError(f"state_dict is {brief(state_dict)} without state and param_groups; give a state_dict()")
    if len(saved) != len(present):
        raise ValueError(
            f"state_dict has {len(saved)} groups and this optimizer {len(present)}; give the state of an optimizer "
            "with as many groups"
        )
    groups, numbers = [], list[object]()
    for index, (entry, group) in enumerate(zip(saved, present, strict=True)):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("params"), list):
            raise ValueError(f"state_dict's group {index} is {brief(entry)} without params; give a state_dict()")
        if len(entry["params"]) != len(group["params"]):
            raise ValueError(
                f"state_dict's group {index} has {len(entry['params'])} parameters and this optimizer's "
                f"{len(group['params'])}; give the state of an optimizer of these parameters"
            )
        for option in UNSERVED:
            if entry.get(option):
                raise ValueError(
                    f"state_dict's group {index} has {option}={entry[option]!r}, an option of torch.optim.AdamW that "
                    "this step does not have; go on with torch.optim.AdamW"
                )
        kept = {option: entry.get(option, group[option]) for option in OPTIONS}
        named = kept["master_dtype"]
        kept["master_dtype"] = MASTER_DTYPES.get(named, named) if isinstance(named, str) else named
        kept["capturable"] = group["capturable"]  # of this run, like the device
        lr = kept["lr"]
        check_group({**kept, "lr": float(lr)} if isinstance(lr, Tensor) and lr.numel() == 1 else kept)
        if kept["weight_decay"] and not entry.get("decoupled_weight_decay", True):
            raise ValueError(
                f"state_dict's group {index} is torch.optim.Adam's with weight_decay={kept['weight_decay']!r}, which "
                "changes gradients, and AdamW's the parameters alone; give the state of a torch.optim.AdamW"
            )
        rest = {key: value for key, value in group.items() if key not in OPTIONS}
        # schedulers keep numbers in groups, and read them again when a run goes on
        more = {key: value for key, value in entry.items() if key not in _OF_TORCH and key != "param_names"}
        groups.append({**rest, **more, **kept, "params": entry["params"]})
        numbers += entry["params"]
    unknown = [key for key in entries if key not in numbers]
    if unknown:
        raise ValueError(
            f"state_dict has a state of {unknown[0]!r}, which none of its groups has; give a state_dict() "
            "as an optimizer returns it"
        )
    return groups, [
        checked_entry(member.name, entries.get(number, {}), partial(state_of, member))
        for member, number in zip(members, numbers, strict=True)
    ]
