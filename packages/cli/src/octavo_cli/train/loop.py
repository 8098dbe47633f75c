"""The training loop: every recipe from the same parameters on the same batches, held-out loss on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from octavo import Recipe
from octavo_cli.errors import RunError
from octavo_cli.train.config import TrainConfig
from octavo_cli.train.data import Corpus
from octavo_cli.train.models.model import Model
from octavo_cli.train.report.results import Evaluation, Observed, Run

ModelFactory = Callable[[TrainConfig, Recipe, int, int], Model]
"""(config, recipe, vocabulary size, seed) -> a fresh model."""


class Watcher(Protocol):
    """Observes the training loop; its methods must not store their arguments."""

    def stepped(self, run: Run) -> None:
        """A step ended: `run.losses[-1]` is its loss."""

    def evaluated(self, run: Run) -> None:
        """An evaluation ended: `run.evaluations[-1]`."""

    def finished(self, run: Run) -> None:
        """The run ended."""


def train_all(
    config: TrainConfig, recipes: Mapping[str, Recipe], corpus: Corpus, make: ModelFactory, watcher: Watcher
) -> Iterator[Run]:
    """Train every recipe from every seed, one seed after the other. `RunError` as soon as a loss is not finite."""
    for seed in config.all_seeds:
        for name, recipe in recipes.items():
            yield train_one(config, name, recipe, seed, corpus, make, watcher)


def train_one(
    config: TrainConfig, name: str, recipe: Recipe, seed: int, corpus: Corpus, make: ModelFactory, watcher: Watcher
) -> Run:
    """One run; its clock covers steps and evaluations, compilation included."""
    run = Run(name, seed)
    held_out = corpus.evaluation(config.held_out, config.context)
    size = 4 * config.batch  # without gradients more sequences fit
    start = time.perf_counter()
    model = make(config, recipe, len(corpus.vocabulary), seed)
    load = np.zeros((config.layers, config.experts))
    for step in range(config.steps):
        tokens = corpus.batch(seed, step, config.batch, config.context)
        result = model.step(tokens, step, observe=step in config.observed_steps)
        run.losses.append(result.loss)
        run.balance.append(result.balance)
        run.gradient_norms.append(result.gradient_norm)
        if result.health:
            run.health.append(Observed(step + 1, result.health))
        if not math.isfinite(result.loss):
            raise RunError(f"{name}, seed {seed}: the loss became {result.loss} at step {step + 1}")
        if step >= config.steps * 3 // 4:
            load += result.load
        watcher.stepped(run)
        if step + 1 in config.evaluation_steps:
            parts = [model.evaluate(held_out[i : i + size]) for i in range(0, len(held_out), size)]
            run.evaluations.append(Evaluation(step + 1, np.concatenate(parts)))
            watcher.evaluated(run)
    run.load = load / load.sum(axis=1, keepdims=True)
    run.seconds = time.perf_counter() - start
    run.weights = model.expert_weights()
    watcher.finished(run)
    return run
