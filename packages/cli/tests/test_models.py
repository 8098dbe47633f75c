"""The same model twice: equal parameters and data give equal losses in torch and in JAX."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import octavo
from octavo import Recipe
from octavo_cli.train.config import QUICK, TrainConfig
from octavo_cli.train.data import read_corpus
from octavo_cli.train.models.model import Model, StepResult, initial_parameters
from octavo_cli.train.report.results import Evaluation, Run, gap_at

CONFIG = dataclasses.replace(TrainConfig(), **QUICK)
RECIPES = {name: octavo.recipe(name) for name in ("fp8-delayed", "nvfp4")}


def _models(recipe: Recipe, vocabulary: int, seed: int) -> tuple[Model, Model]:
    from octavo_cli.train.models.jax_model import JaxModel
    from octavo_cli.train.models.torch_model import TorchModel

    return TorchModel(CONFIG, recipe, vocabulary, seed, "cpu"), JaxModel(CONFIG, recipe, vocabulary, seed, "cpu")


@pytest.mark.parametrize("name", ["fp8-delayed", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_both_frameworks_train_the_same_model(name: str, text_file: Path, seed: int) -> None:
    """Loss, balance and load of three steps and an evaluation; stateful and stochastic recipes included.

    The tolerance is far above fp32 summation order and far below what a wrong layer, a lost gradient or other random
    bits would do; equal bits of the quantizers are tested elsewhere.
    """
    corpus = read_corpus(text_file, CONFIG.context)
    models = _models(RECIPES[name], len(corpus.vocabulary), seed)

    def both(step: int) -> tuple[StepResult, StepResult]:
        tokens = corpus.batch(seed, step, CONFIG.batch, CONFIG.context)
        return models[0].step(tokens, step), models[1].step(tokens, step)

    for step in range(3):
        a, b = both(step)
        assert a.loss == pytest.approx(b.loss, rel=2e-3)
        assert a.balance == pytest.approx(b.balance, rel=2e-2)
        assert a.load.sum() == b.load.sum() == CONFIG.batch * CONFIG.context * CONFIG.top_k
    tokens = corpus.evaluation(8, CONFIG.context)
    held_out = [model.evaluate(tokens) for model in models]
    assert held_out[0] == pytest.approx(held_out[1], rel=2e-2)
    assert held_out[0] == pytest.approx(models[0].evaluate(tokens), abs=0), "an evaluation changed the model"
    weights = [model.expert_weights() for model in models]
    assert list(weights[0]) == list(weights[1]) == ["layer0.fc1", "layer0.fc2"]
    start = initial_parameters(CONFIG, len(corpus.vocabulary), seed)
    for key, value in weights[0].items():
        moved = np.abs(value - start[key]).mean()
        assert moved > 0, f"{key} never trained"
        assert np.abs(value - weights[1][key]).mean() < 0.5 * moved


def test_initial_parameters_come_from_the_seed_alone(seed: int) -> None:
    """Same seed, same bits; another seed, others."""
    first, again, other = (initial_parameters(CONFIG, 50, value) for value in (seed, seed, seed + 1))
    for name, value in first.items():
        assert value.dtype == np.float32
        assert np.array_equal(value, again[name])
    assert not np.array_equal(first["embedding"], other["embedding"])


def _run(recipe: str, seed: int, losses: list[float]) -> Run:
    return Run(recipe, seed, evaluations=[Evaluation(1, np.array(losses))])


def test_the_gap_is_paired_and_stands_beside_its_spread() -> None:
    """Over seeds where there are several, else over held-out sequences, and the report says which."""
    one = [_run("bf16", 0, [2.0, 4.0]), _run("mxfp8", 0, [2.2, 4.0])]
    gap = gap_at(one, "mxfp8")
    assert gap.percent == pytest.approx(100 * 0.1 / 3.0)
    assert gap.spread == pytest.approx(100 * np.std([0.2, 0.0], ddof=1) / 2**0.5 / 3.0)
    assert gap.spread_over == "2 held-out sequences"
    two = [*one, _run("mxfp8", 1, [3.0, 3.0]), _run("bf16", 1, [3.0, 3.0])]
    gap = gap_at(two, "mxfp8")
    assert gap.per_seed == pytest.approx((100 * 0.1 / 3.0, 0.0))
    assert gap.percent == pytest.approx(50 * 0.1 / 3.0)
    assert gap.spread == pytest.approx(np.std([100 * 0.1 / 3.0, 0.0], ddof=1))
    assert gap.spread_over == "2 paired seeds"
