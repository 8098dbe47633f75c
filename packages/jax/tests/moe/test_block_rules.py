"""How the router of a block chooses: the rules of `choose_experts`, a bias for choosing, and choices that are given."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_jax
from octavo_jax import moe

T, K, F, E, C = 24, 32, 16, 8, 2
BACKEND = "jax-reference"
RULES: dict[str, dict[str, Any]] = {
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5},
    "roots of softplus": {"score": "sqrtsoftplus", "renormalize": False},
    "softmax": {"renormalize": False, "scale": 0.5},
}
CASES = (("sigmoid in groups", False), ("roots of softplus", True), ("softmax", False))
FP32 = 2**-20
"""Sixteen units of fp32: means of 24 tokens' shares in two orders, and sums of 8 experts."""

Given = dict[str, Any]


@pytest.fixture
def given(rng: np.random.Generator) -> Given:
    """x, the router, both kernels."""
    shapes = {"x": (T, K), "router": (K, E), "wi": (E, K, 2 * F), "wo": (E, F, K)}
    return {name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for name, shape in shapes.items()}


def _in_parts(p: Given, rule: Given, bias: Any, replay: Any) -> Any:
    logits = jnp.matmul(p["x"], p["router"], precision="highest", preferred_element_type=jnp.float32)
    choice = octavo_jax.choose_experts(logits, C, bias=bias, replay=replay, backend=BACKEND, **rule)
    routing = moe.arrange(choice.choices, choice.weights, E)
    y = moe.routed_mlp(p["x"], routing, p["wi"], p["wo"], recipe=None, backend=BACKEND)
    return y, choice, octavo_jax.router_losses(logits, choice.choices, score=rule.get("score", "softmax")).aux


@pytest.mark.parametrize(("name", "replayed"), CASES)
def test_a_block_chooses_by_the_rules_of_choose_experts(
    name: str, replayed: bool, given: Given, rng: np.random.Generator
) -> None:
    """y and all gradients are those of the parts, bit for bit: a layer of DeepSeek-V3 is one call, which a mesh may
    spread. A bias chooses and weighs nothing; choices that another pass made are taken, and nobody's add no row."""
    rule = RULES[name]
    bias = jnp.asarray(rng.standard_normal(E), jnp.float32)
    replay = jnp.asarray(rng.permuted(np.tile(np.arange(-1, E), (T, 1)), axis=1)[:, :C]) if replayed else None
    dy = jnp.asarray(rng.standard_normal((T, K)), jnp.float32)

    @jax.jit
    def both(p: Given) -> Any:
        def block(p: Given) -> Any:
            y, stats = moe.moe_mlp(
                **p, k=C, recipe=None, choice_bias=bias, replay=replay, backend=BACKEND, **rule
            )  # fmt: skip
            return y, stats

        def parts(p: Given) -> Any:
            y, *others = _in_parts(p, rule, bias, replay)
            return y, others

        ends = [jax.vjp(one, p, has_aux=True) for one in (block, parts)]
        return [(y, pull(dy)[0], others) for y, pull, others in ends]

    (y, gradients, stats), (wanted, wanted_gradients, (choice, balance)) = both(given)
    assert np.array_equal(y, wanted)
    for of, gradient in gradients.items():
        assert np.array_equal(gradient, wanted_gradients[of]), of
    assert np.array_equal(stats.load, choice.counts)
    assert (int(stats.load.sum()) < T * C) == replayed
    if not replayed:  # where some choices are nobody's, the block's loss is of those that are an expert's
        np.testing.assert_allclose(stats.balance_loss, balance, rtol=FP32)


def test_a_bias_moves_choices_and_no_gradient(given: Given) -> None:
    """As `choice_bias` of PyTorch's MoE: raised for an expert that nobody chose, every token goes there."""
    call = partial(moe.moe_mlp, **given, k=1, score="sigmoid", recipe=None, backend=BACKEND)
    bias = jnp.zeros(E).at[3].set(2)

    @jax.jit
    def results(bias: Any) -> Any:
        y, pull, stats = jax.vjp(lambda bias: call(choice_bias=bias), bias, has_aux=True)
        return y, stats, pull(jnp.ones_like(y))[0], call(replay=jnp.full((T, 1), 3))[0]

    y, stats, gradient, replayed = results(bias)
    assert stats.load.tolist() == [0, 0, 0, T, 0, 0, 0, 0]
    assert not np.asarray(gradient).any()
    assert np.array_equal(y, replayed)


def test_leading_axes_and_a_mask_meet_choices_that_are_given(given: Given) -> None:
    """replay has the tokens' axes; what the mask leaves out adds no row, whatever was chosen for it."""
    mask = jnp.arange(T).reshape(2, T // 2) % 3 != 0
    x, replay = given["x"].reshape(2, T // 2, K), jnp.zeros((2, T // 2, 1), jnp.int32)
    others = {name: given[name] for name in ("router", "wi", "wo")}
    block = jax.jit(partial(moe.moe_mlp, k=1, recipe=None, backend=BACKEND))
    y, stats = block(x, **others, replay=replay, mask=mask)
    assert stats.load.tolist() == [int(mask.sum()), *[0] * (E - 1)]
    assert not np.asarray(y)[~np.asarray(mask)].any()


@pytest.mark.parametrize("share", ["choices", "tokens"])
def test_a_balance_loss_of_choices_that_are_nobodys(share: str, given: Given) -> None:
    """It is 1 where load and shares are even, whichever choices of a replay are nobody's: with half of them it was 2,
    and so was the router's gradient. The mask still says which tokens count."""
    replay, mask = np.arange(T * C).reshape(T, C) % E, np.arange(T) >= E
    replay[(slice(None), 1) if share == "choices" else slice(T // 2)] = -1
    even = given | {"router": jnp.zeros((K, E))}
    for kept in (None, mask):
        _, stats = jax.jit(partial(moe.moe_mlp, k=C, recipe=None, backend=BACKEND))(**even, replay=replay, mask=kept)
        load, inside = np.asarray(stats.load), T if kept is None else T - E
        assert load.sum() == (replay[T - inside :] >= 0).sum()
        np.testing.assert_allclose(stats.balance_loss, 1, rtol=FP32)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"mask": np.ones(T, np.float32)}, r"mask has shape \[24\] and dtype float32.*; give bool \[24\], False for"),
        ({"mask": np.ones((T, 1), bool)}, r"mask has shape \[24, 1\] .*; give bool \[24\]"),
        ({"score": "tanh"}, "score is 'tanh'; give 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
        ({"groups": 3}, "groups is 3, kept_groups 1, and there are 8 experts"),
        ({"scale": float("nan")}, "scale is nan; give a finite number"),
        ({"choice_bias": np.zeros(3)}, r"choice_bias has shape \[3\]; give \[8\], one number per expert"),
        ({"choice_bias": np.zeros(E, np.int32)}, "choice_bias has dtype int32"),
        ({"replay": np.zeros((T, 3), np.int32)}, r"replay has shape \[24, 3\] .*; give integers \[24, 2\]"),
        ({"replay": np.zeros((T, C))}, r"dtype float.*; give integers \[24, 2\]"),
        ({"replay": [[0, 1]] * T}, "replay is a list"),
    ],
)
def test_messages(changed: Given, sentence: str, given: Given) -> None:
    """Before anything is traced: the argument, what was given, what is needed."""
    with pytest.raises((TypeError, ValueError), match=sentence):
        moe.moe_mlp(**given, k=C, recipe=None, backend=BACKEND, **changed)


def test_explain_asks_for_the_rule(given: Given) -> None:
    """A rule that does not fit is refused there, too, as the block would."""
    report = moe.explain(**given, k=C, recipe=None, backend=BACKEND, **RULES["sigmoid in groups"])
    assert dict(report.tokens)["experts"] == "XLA chooses"
    with pytest.raises(ValueError, match="score is 'tanh'"):
        moe.explain(**given, k=C, recipe=None, backend=BACKEND, score="tanh")  # type: ignore[arg-type]
