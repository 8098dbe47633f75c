"""`octavo bench step` on the reference backends: every recipe in torch and in JAX."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from octavo_bench.harness.recipes import FRAMEWORK as PEER
from octavo_bench.harness.recipes import KINDS
from octavo_bench.training.jax import dense_step
from octavo_jax.counting import count_runs

Step = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def step(tmp_path: Path, run: Any) -> Step:
    """step("--framework", "jax", ...): the file and the output of the command on a small shape."""

    def call(*arguments: str) -> tuple[dict[str, Any], str]:
        target = tmp_path / "step.json"
        line = ["bench", "step", "--device", "cpu", "--shape", "3,48,80,150", "--repeats", "1", "--output", str(target)]
        result = run(*line, *arguments)
        assert result.code == 0, result.out[-3000:] + result.err
        return json.loads(target.read_text()), result.out

    return call


def test_torch_runs_every_recipe_and_reuses_weights(step: Step, has_the_schema_of: Any) -> None:
    """The framework's own first; quantized kinds twice."""
    content, out = step("--backend", "torch-reference", "--reuse-weights", "--sizes", "skewed")
    kinds = [(row["kind"], row["weights_reused"]) for row in content["rows"]]
    expected = [(kind, reuse) for kind in KINDS for reuse in (False, True) if not (reuse and kind == "bf16")]
    # torch's wgrad wants aligned groups: sizes of a random draw may leave it out, with a note
    assert [one for one in kinds if one[0] != PEER] == expected
    assert content["failures"] == []
    assert all(row["ms"] > 0 for row in content["rows"])
    assert content["goals"] == {"reached": 0, "of": 0}
    assert "forward + backward in torch" in out
    has_the_schema_of(content, "step-h200-2026-11-30.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delayed", "nvfp4"])
def test_jax_runs_a_stateful_and_a_stochastic_recipe(step: Step, kind: str) -> None:
    """Delayed scaling's state goes through the gradient; NVFP4 has its seed."""
    content, _ = step("--framework", "jax", "--backend", "jax-reference", "--kinds", kind, "--sizes", "even")
    assert [row["kind"] for row in content["rows"]] == [PEER, kind]
    assert content["failures"] == []
    assert all("over_torch" not in row for row in content["rows"])
    assert content["rows"][1]["backends"] == ["jax-reference"]


def test_both_frameworks_in_one_run(step: Step) -> None:
    """A row each of the same step, and how the times compare; peers are left out where nobody asks for them."""
    content, out = step("--framework", "jax,torch", "--kinds", "current", "--sizes", "even", "--no-peers")
    assert [(row["framework"], row["kind"]) for row in content["rows"]] == [("torch", "current"), ("jax", "current")]
    first, second = content["rows"]
    assert second["over_torch"] > 0
    assert "over_torch" not in first
    assert content["frameworks"] == ["torch", "jax"]
    assert "in torch and jax" in out


def test_a_step_gives_the_layers_gradients(seed: int) -> None:
    """What is timed is the real thing: gradients of x and w in their dtype, close to torch's own."""
    import torch

    from octavo_bench.harness.engine.torch import TorchEngine
    from octavo_bench.harness.problem import draw
    from octavo_bench.harness.shapes import Shape
    from octavo_bench.training.torch import linear_calls

    engine = TorchEngine("cpu")
    data = draw(engine, Shape("tiny", 3, 48, 80, 152), seed)
    (own,) = linear_calls(engine, data, (64, 0, 88), PEER, None, reuse=False)
    try:
        expected = own()
    except RuntimeError as error:
        pytest.skip(f"this torch's grouped GEMM does not run here: {error}")
    for kind in ("bf16", "block"):
        (call,) = linear_calls(engine, data, (64, 0, 88), kind, "torch-reference", reuse=kind == "block")
        for ours, theirs in zip(call(), expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            # E4M3 rounds each operand by up to 2^-4; bf16 results by 2^-9
            limit = 2.0**-3 if kind == "block" else 2.0**-7
            assert torch.linalg.vector_norm((ours - theirs).float()) <= limit * torch.linalg.vector_norm(theirs.float())


@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_a_jax_step_runs_all_three_gemms(kind: str) -> None:
    """The forward pass, too: XLA leaves out whatever the results do not need, and a step is timed whole."""
    x, kernel, dy = jnp.ones((150, 48)), jnp.ones((3, 48, 80)), jnp.ones((150, 80))
    runs = count_runs(dense_step(kind, "jax-reference", 3), x, kernel, dy, jnp.array([50, 50, 50]))
    assert (runs.quantize, runs.fprop, runs.dgrad, runs.wgrad) == (3, 1, 1, 1)
