"""Ctrl-C during training: recipes that have finished are kept, and the others have not been run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from octavo import Recipe
from octavo_cli.train.config import TrainConfig
from octavo_cli.train.report.results import Run


@dataclass(frozen=True, slots=True)
class Trained:
    """What there is to report: each of `recipes` was trained from every seed of `config`.

    stopped   whether Ctrl-C ended the training
    missing   names of the recipes that were asked for and did not finish
    """

    config: TrainConfig
    recipes: Mapping[str, Recipe]
    runs: list[Run]
    stopped: bool = False
    missing: tuple[str, ...] = ()


def until_stopped(config: TrainConfig, recipes: Mapping[str, Recipe], runs: Iterable[Run]) -> Trained:
    """All of `runs`, which come seed by seed; after Ctrl-C the seeds that every recipe has finished.

    In the first seed the recipes that have finished are kept. KeyboardInterrupt if not one of them has.
    """
    finished: list[Run] = []
    try:
        for run in runs:
            finished.append(run)  # noqa: PERF402  # extend is not said to keep what came before an exception
    except KeyboardInterrupt:
        if not finished:
            raise
        seeds = max(1, len(finished) // len(recipes))
        kept = finished[: seeds * len(recipes)]
        names = {run.recipe for run in kept}
        return Trained(
            replace(config, seeds=seeds),
            {name: recipe for name, recipe in recipes.items() if name in names},
            kept,
            stopped=True,
            missing=tuple(name for name in recipes if name not in names),
        )
    return Trained(config, recipes, finished)
