"""What `octavo train` runs: an immutable value, checked once and stored with the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo import Recipe, RecipeError, load_recipe
from octavo import recipe as preset
from octavo_cli.errors import InputError
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.names import FRONT_ENDS

BASELINE = "bf16"
"""The preset that every other recipe is compared with; it is always run, and first."""

HEAD_WIDTH = 32
"""Channels of one attention head; the width is a multiple of it, which is also an MX block."""


OBSERVATIONS = 6
"""Steps of a run in which the quantizers are observed: on a CPU one of them takes as long as two or three others."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Sizes and lengths. Tokens are bytes; a step sees `batch * context` of them, each goes to `top_k` experts.

    width           model channels, in-features of fc1 and out-features of fc2
    hidden          channels between fc1 (which makes 2 * hidden for SwiGLU) and fc2
    evaluations     held-out evaluations in a run, evenly spaced; the last one follows the last step
    held_out        sequences of `context` tokens in one evaluation, the same ones in every run
    balance         weight of the load-balancing loss
    """

    steps: int = 120
    seed: int = 0
    seeds: int = 1
    experts: int = 8
    top_k: int = 2
    width: int = 128
    hidden: int = 256
    layers: int = 1
    batch: int = 8
    context: int = 64
    evaluations: int = 4
    held_out: int = 96
    learning_rate: float = 6e-3
    balance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("steps", "seeds", "experts", "top_k", "layers", "batch", "evaluations", "held_out"):
            _at_least(name, getattr(self, name), 1)
        _at_least("context", self.context, 2)
        _at_least("seed", self.seed, 0)
        _at_most("steps", self.steps, 1_000_000)
        _at_most("seeds", self.seeds, 100)
        _at_most("experts", self.experts, 4096)
        _at_most("width", self.width, 8192)
        _at_most("seed", self.seed, 2**63 - 1)
        if self.top_k > self.experts:
            raise InputError(f"--top-k is {self.top_k} and --experts is {self.experts}; a token needs distinct experts")
        for name in ("width", "hidden"):
            value = getattr(self, name)
            if value < HEAD_WIDTH or value % HEAD_WIDTH:
                raise InputError(f"--{name} is {value}; it is a multiple of {HEAD_WIDTH}, at least {HEAD_WIDTH}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate is {self.learning_rate}; it is a finite number above 0")

    @property
    def all_seeds(self) -> range:
        """The seeds that are run, one after the other."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def evaluation_steps(self) -> tuple[int, ...]:
        """Numbers of finished steps after which the held-out loss is taken; the last one is `steps`."""
        count = min(self.evaluations, self.steps)
        return tuple(round(self.steps * (index + 1) / count) for index in range(count))

    @property
    def observed_steps(self) -> frozenset[int]:
        """Numbers, from 0, of the steps in which the quantizers are observed: first, last and evenly between."""
        last = self.steps - 1
        count = min(OBSERVATIONS, self.steps)
        return frozenset(round(last * index / max(1, count - 1)) for index in range(count))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


QUICK: dict[str, int] = {
    "steps": 12,
    "width": 64,
    "hidden": 128,
    "experts": 4,
    "batch": 4,
    "context": 32,
    "evaluations": 2,
    "held_out": 8,
}
"""What `--quick` changes: seconds rather than minutes; it shows that everything works and trains nothing well."""


def parse_recipes(text: str) -> dict[str, Recipe]:
    """Recipes by name from `bf16,mxfp8,mine.toml`, the baseline first; `InputError` for unknown or repeated names."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InputError("--recipes is empty; give names with commas between them, such as bf16,mxfp8")
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"--recipes names {repeated!r} twice; give each recipe once")
    ordered = [BASELINE, *(name for name in names if name != BASELINE)]
    try:
        return {name: load_recipe(name) if name.endswith((".json", ".toml")) else preset(name) for name in ordered}
    except RecipeError as error:
        raise InputError(f"--recipes: {error}") from None


def pick_framework(requested: str | None, installed: Sequence[str]) -> str:
    """The framework to train with: the one asked for, else torch, else JAX, of those that are installed."""
    known = ("torch", "jax")
    if requested is not None and requested not in known:
        raise InputError(f"--framework is {requested!r}; give torch or jax")
    if requested is not None and requested not in installed:
        raise InputError(f"--framework {requested} is not installed here; {how_to_install(FRONT_ENDS[requested])}")
    for name in (requested,) if requested is not None else known:
        if name in installed:
            return name
    ways = "; or, ".join(f"for {name}, {how_to_install(FRONT_ENDS[name])}" for name in known)
    raise InputError(f"no framework is installed; {ways}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"--{name.replace('_', '-')} is {value}; it is at least {least}")


def _at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise InputError(f"--{name.replace('_', '-')} is {value}; it is at most {most}")
