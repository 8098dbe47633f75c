"""names_in_files: the names that a model's experts have in published files, if transformers has renamed them since."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from torch import nn

from octavo_torch.checkpoint.formats.places import path_of
from octavo_torch.checkpoint.formats.source import Source

_EXPERTS = re.compile(r"((?:.+\.)?experts)\.")


class Renaming(Protocol):
    """One of transformers' renamings."""

    def rename_source_key(self, source_key: str) -> tuple[str, object]:
        """The name in the model of a name in a file, and what it has matched."""
        ...


def names_in_files(model: nn.Module, names: Sequence[str], path: str | Path, prefix: str) -> dict[str, str]:
    """For each of the experts modules `names`, its name in the files, without `prefix`: Mixtral's mlp.experts are
    block_sparse_moe.experts there.

    A module keeps its own name if the files have that, and if they do not have the module at all.
    """
    renamings = _renamings(model)
    if not renamings or not isinstance(prefix, str):  # which load_experts refuses
        return {name: name for name in names}
    there = {found[1] for name in Source(Path(path)).names if (found := _EXPERTS.match(name))}
    by_own_name = {_renamed(one, renamings): one for one in sorted(there) if one.startswith(prefix)}
    in_files = {}
    for name in names:
        own = path_of(name, prefix)
        in_files[name] = name if own in there or own not in by_own_name else by_own_name[own].removeprefix(prefix)
    return in_files


def _renamed(name: str, renamings: Iterable[Renaming]) -> str:
    name = f"{name}."  # patterns end where a part of the name does
    for one in renamings:
        name, _ = one.rename_source_key(name)
    return name.removesuffix(".")


def _renamings(model: nn.Module) -> list[Renaming]:
    """What transformers renames when it loads this model; nothing for a model of another library."""
    try:
        from transformers import PreTrainedModel  # type: ignore[import-not-found,unused-ignore]
        from transformers.conversion_mapping import (  # type: ignore[import-not-found,unused-ignore]
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import WeightRenaming  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return []
    if not isinstance(model, PreTrainedModel):
        return []
    return [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
