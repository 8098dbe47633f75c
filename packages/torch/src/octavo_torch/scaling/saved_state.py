"""Buffers of a recipe that a state dict holds and a module lacks, or vice versa: the error says what to do."""

from __future__ import annotations

from collections.abc import Collection

from octavo import Recipe

STATE_BUFFERS = ("seed_base", "seed_counter", "amax_history", "encode_scale")
"""The buffers that modules have, by their recipe."""

CONVERT = (
    "create the module with the recipe that it was saved with, load the checkpoint, and then call "
    "octavo_torch.convert(module, recipe), which starts a state anew where the recipe has one"
)
"""What to do where a checkpoint holds the state of another recipe."""


class _Explained(str):
    """A key among those that `load_state_dict` reports, which prints a sentence where torch lists the keys."""

    __slots__ = ("sentence",)
    sentence: str

    def __format__(self, spec: str) -> str:
        return f"{self!s:{spec}}: {self.sentence}"


def explain_keys(
    own: Collection[str],
    recipe: Recipe,
    state_dict: Collection[str],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
) -> None:
    """Has the last key of `missing` or `unexpected` that belongs to another recipe's state say so.

    torch raises for these keys where loading is strict, which a module is not told, and then prints them.
    """
    saved = [name for name in STATE_BUFFERS if prefix + name in state_dict]
    here = [name for name in STATE_BUFFERS if name in own]
    keys = {prefix + name for name in STATE_BUFFERS}
    for reported in (unexpected, missing):
        for index in reversed(range(len(reported))):
            if saved != here and reported[index] in keys:
                key = reported[index] = _Explained(reported[index])
                key.sentence = (
                    f"the checkpoint of {prefix[:-1] or 'this module'} has {', '.join(saved) or 'no state'} of its "
                    f"recipe, and {recipe.kind} has {', '.join(here) or 'no state'}; {CONVERT}"
                )
                return
