"""Routing, permutation and combination against loops in float64: any number of choices, empty experts, tokens left out.

Nothing is dropped, nothing depends on an order of sums, and what is left out may hold NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import SUMS, assert_sums_agree

from octavo_jax import choose_experts, moe
from octavo_jax.policies import save_quantized

WIDTH = 6
CASES = {"usual": (13, 5, 2), "every expert": (4, 3, 3), "one choice": (7, 4, 1), "one token": (1, 5, 2)}


@partial(jax.jit, static_argnums=(4, 5))
def _through(x: Any, logits: Any, mask: Any, dy: Any, k: int, renormalize: bool) -> Any:
    """Routing, stats, rows doubled and combined, gradients of x and of logits through y and the balance loss."""

    def run(x: Any, logits: Any) -> Any:
        routing = moe.route(logits, k, renormalize=renormalize, mask=mask)
        rows = moe.permute(x, routing)
        y = moe.combine(rows * (1 + jnp.arange(rows.shape[1])), routing)
        return (y, moe.router_stats(routing).balance_loss), (routing, rows)

    outs, pull, (routing, rows) = jax.vjp(run, x, logits, has_aux=True)
    return outs, pull((dy, jnp.float32(3))), routing, rows


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _expected(x: np.ndarray, logits: np.ndarray, chosen: np.ndarray, renormalize: bool) -> Any:
    """(y, balance loss) of tokens that all go somewhere, in float64, the choices given."""
    probabilities = _softmax(logits)
    experts = logits.shape[1]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    y = weights.sum(axis=1, keepdims=True) * x * (1 + np.arange(x.shape[1]))
    share = np.bincount(chosen.reshape(-1), minlength=experts) / chosen.size
    return y, experts * (share * probabilities.mean(axis=0)).sum()


def test_renormalize_has_an_old_name(rng: np.random.Generator) -> None:
    """`normalize` gives the same result with one warning, and is refused beside renormalize."""
    x, router, wi, wo = (rng.standard_normal(shape, np.float32) for shape in ((7, 8), (8, 3), (3, 8, 8), (3, 4, 8)))
    calls: tuple[Any, ...] = (
        partial(moe.route, x @ router, 2),
        partial(moe.moe_mlp, x, router, wi, wo, k=2, recipe=None),
    )
    for call in calls:
        with pytest.warns(DeprecationWarning, match="normalize is called renormalize now") as said:
            made = jax.jit(lambda call=call: call(normalize=False))()
        assert [one.filename for one in said] == [__file__]
        jax.tree.map(np.testing.assert_array_equal, made, jax.jit(lambda call=call: call(renormalize=False))())
        with pytest.raises(TypeError, match="both were given; give renormalize alone"):
            call(normalize=False, renormalize=False)


@pytest.mark.parametrize("case", CASES)
def test_routes_as_loops_do(case: str, rng: np.random.Generator) -> None:
    """Choices, order, y, balance loss; both gradients against central differences of the float64 loops.

    A fifth of the tokens is left out and holds NaN everywhere, its gradients zeros (faults.md 9, 11, 12). Values may be
    off by `SUMS` of the largest, and by as much again for each unit of the largest logit, which was rounded to float32
    and of which a softmax makes an error of its result; so may slopes, of the objective's addends, which cancel where
    weights are normalized. Central differences add 1e-9 of them.
    """
    tokens, experts, k = CASES[case]
    renormalize = k > 1
    mask = rng.random(tokens) < 0.8
    mask[0] = True
    x, dy = (rng.standard_normal((tokens, WIDTH)) for _ in range(2))
    logits = rng.standard_normal((tokens, experts)) * 2
    given = [np.where(mask[:, None], a, np.nan).astype(np.float32) for a in (x, logits)]
    (y, balance), (dx, dlogits), routing, rows = _through(*given, mask, dy.astype(np.float32), k, renormalize)

    chosen = np.argsort(-logits.astype(np.float32), axis=1, kind="stable")[:, :k]
    choices = [(e, t, j) for t in range(tokens) if mask[t] for j, e in enumerate(chosen[t])]
    wanted = sorted(choices, key=lambda choice: choice[0])  # stable: within an expert the order of tokens
    total = len(wanted)
    assert np.asarray(routing.group_sizes).tolist() == np.bincount([c[0] for c in wanted], minlength=experts).tolist()
    assert np.asarray(routing.order)[:total].tolist() == [t * k + j for _, t, j in wanted]
    assert np.array_equal(np.asarray(routing.position).reshape(-1)[routing.order], np.arange(tokens * k))
    assert np.array_equal(np.asarray(rows)[:total], given[0][[t for _, t, _ in wanted]])

    def reference(x: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, float]:
        return _expected(x[mask], logits[mask], chosen[mask], renormalize)

    wanted_y, wanted_balance = reference(x, logits)
    off = SUMS * (1 + np.abs(logits).max())
    assert np.abs(np.asarray(y)[mask] - wanted_y).max() <= off * np.abs(wanted_y).max()
    assert not np.asarray(y)[~mask].any()
    assert abs(float(balance) - wanted_balance) <= off * wanted_balance

    def objective(x: np.ndarray, logits: np.ndarray) -> float:
        y, balance = reference(x, logits)
        return float((y * dy[mask]).sum() + 3 * balance)

    for index, actual in enumerate((dx, dlogits)):
        point = [x, logits]
        direction = rng.standard_normal(point[index].shape) * mask[:, None]
        moved = [[a + sign * 1e-6 * direction if i == index else a for i, a in enumerate(point)] for sign in (1, -1)]
        slope = (objective(*moved[0]) - objective(*moved[1])) / 2e-6
        assert np.isfinite(actual).all()
        assert not np.asarray(actual)[~mask].any()
        addends = np.abs(wanted_y * dy[mask]).sum() + 3 * wanted_balance
        allowed = off * np.abs(actual).max() * np.abs(direction).sum() + (off + 1e-9) * addends
        assert abs((np.asarray(actual, np.float64) * direction).sum() - slope) <= allowed


def test_one_expert_takes_all_and_ties_go_to_the_lower_number() -> None:
    """Sizes are whatever the router says, up to every row; the others are empty."""

    @jax.jit
    def routes() -> Any:
        one = moe.route(jnp.zeros((9, 4)).at[:, 2].set(5.0), 1)
        two = moe.route(jnp.zeros((3, 4)), 2)
        return one.group_sizes, two.group_sizes, moe.router_stats(moe.route(jnp.zeros((8, 4)), 4)).balance_loss

    one, two, loss = map(np.asarray, routes())
    assert one.tolist() == [0, 0, 9, 0]
    assert two.tolist() == [3, 3, 0, 0]
    assert loss == 1


def test_experts_are_in_the_order_of_their_logits(rng: np.random.Generator) -> None:
    """As `choose_experts` and torch's MoE have them: probabilities that round to one number, or to 0, are no ties."""
    near = np.nextafter(np.float32(0.01), np.float32(1))
    logits = np.concatenate(
        [np.array([[0.01, near, -3, -4], [0, -200, -300, -150]], np.float32), rng.standard_normal((20, 4)) * 1e-6 + 3]
    ).astype(np.float32)

    @jax.jit
    def sizes(logits: Any) -> Any:
        pairs = [(moe.route(logits, k).group_sizes, choose_experts(logits, k).counts) for k in (1, 2)]
        return pairs, moe.route(logits[:2], 2).group_sizes

    pairs, of_two = sizes(logits)
    for routed, chosen in pairs:
        assert np.array_equal(routed, chosen)
    assert of_two.tolist() == [2, 1, 0, 1]


def test_no_tokens() -> None:
    """T = 0: every size, the loss and the gradients are zero or empty."""
    (y, balance), (dx, _), routing, _ = _through(
        *(np.zeros((0, n), np.float32) for n in (6, 4)), None, jnp.zeros((0, 6)), 2, True
    )
    assert y.shape == dx.shape == (0, 6)
    assert np.asarray(routing.group_sizes).tolist() == [0, 0, 0, 0]
    assert float(balance) == 0


def test_choices_of_another_router(rng: np.random.Generator) -> None:
    """`arrange` takes given choices; a number that is no expert's leaves that choice out alone (faults.md 61)."""
    chosen = jnp.array([[1, 7], [-1, 0], [1, 0]])
    weights = jnp.asarray(rng.random((3, 2)), jnp.float32).at[0, 1].set(jnp.nan)
    arrange = jax.jit(moe.arrange, static_argnums=2)
    routing = arrange(chosen, weights, 2)
    assert np.asarray(routing.group_sizes).tolist() == [2, 2]
    assert np.asarray(routing.order)[:4].tolist() == [3, 5, 0, 4]
    rows = jnp.asarray(rng.standard_normal((6, WIDTH)), jnp.float32).at[4:].set(jnp.nan)
    y, pull = jax.vjp(jax.jit(lambda rows, w: moe.combine(rows, moe.arrange(chosen, w, 2))), rows, weights)
    kept = np.nan_to_num(np.asarray(weights)) * np.array([[1, 0], [0, 1], [1, 1]])
    wanted = sum(kept[:, j, None] * np.nan_to_num(np.asarray(rows))[routing.position[:, j]] for j in range(2))
    assert_sums_agree(y, wanted)
    drows, dweights = map(np.asarray, pull(jnp.ones_like(y)))
    assert not drows[4:].any()
    assert dweights[0, 1] == dweights[1, 0] == 0
    with pytest.raises(ValueError, match="because arrange made it"):
        moe.router_stats(routing)


def test_nothing_scatters_and_a_router_runs_once(rng: np.random.Generator) -> None:
    """Gradients add by gathers, the one scatter inverts a permutation; under save_quantized nothing is routed again.

    Rows quantized in one order never meet sizes of another (faults.md 43).
    """
    x, logits = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 4), (8, 3)))

    def loss(x: Any, logits: Any) -> Any:
        routing = moe.route(logits, 2, backend="jax-reference")
        rows = jnp.tanh(moe.permute(x, routing, backend="jax-reference"))
        return jnp.sum(jnp.tanh(moe.combine(rows, routing, backend="jax-reference")))

    def counts(function: Any) -> list[int]:
        text = str(jax.make_jaxpr(jax.grad(function, argnums=(0, 1)))(x, logits))
        return [text.count(f" {name}[") for name in ("top_k", "sort", "scatter", "scatter-add", "scatter_add")]

    assert counts(loss) == [1, 1, 1, 0, 0]
    assert counts(jax.checkpoint(loss, policy=save_quantized())) == [1, 1, 1, 0, 0]
    assert counts(jax.checkpoint(loss))[:3] == [2, 2, 2]


def test_bad_arguments() -> None:
    """Each sentence names the argument, its shape or value, and what is needed."""
    routing = jax.jit(lambda: moe.route(jnp.zeros((4, 3)), 2))()
    cases = {
        r"logits has shape \[2, 4, 3\]": lambda: moe.route(jnp.zeros((2, 4, 3)), 2),
        "dtype int32; it must be bfloat16": lambda: moe.route(jnp.zeros((4, 3), jnp.int32), 2),
        "k is 4 and a token has 3 of 3 experts": lambda: moe.route(jnp.zeros((4, 3)), 4),
        "k is True": lambda: moe.route(jnp.zeros((4, 3)), True),
        r"mask has shape \[3\] and dtype bool; give bool \[4\]": lambda: moe.route(
            jnp.zeros((4, 3)), 2, mask=jnp.ones(3, bool)
        ),
        "mask has shape .* int32": lambda: moe.route(jnp.zeros((4, 3)), 2, mask=jnp.ones(4, jnp.int32)),
        r"experts has shape \[4\]": lambda: moe.arrange(jnp.zeros(4, jnp.int32), jnp.zeros(4), 2),
        r"experts has shape \[4, 1\] and dtype float32": lambda: moe.arrange(jnp.zeros((4, 1)), jnp.zeros((4, 1)), 2),
        r"experts has shape \[4, 0\]": lambda: moe.arrange(jnp.zeros((4, 0), jnp.int32), jnp.zeros((4, 0)), 2),
        r"weights has shape \[4, 1\] and dtype int32": lambda: moe.arrange(*[jnp.zeros((4, 1), jnp.int32)] * 2, 2),
        r"weights has shape \[4\]": lambda: moe.arrange(jnp.zeros((4, 1), jnp.int32), jnp.zeros(4), 2),
        "num_experts is 0": lambda: moe.arrange(jnp.zeros((4, 1), jnp.int32), jnp.zeros((4, 1)), 0),
        r"x has shape \[3, 5\] and the routing needs 4": lambda: moe.permute(jnp.zeros((3, 5)), routing),
        r"rows has shape \[4, 5\] and the routing needs 8": lambda: moe.combine(jnp.zeros((4, 5)), routing),
        r"rows has shape \[8\]": lambda: moe.combine(jnp.zeros(8), routing),
        "rows has dtype int32; it must be": lambda: moe.combine(jnp.zeros((8, 5), jnp.int32), routing),
        r"x has shape \[3, 5\] and the routing needs 4 .*, one row per token": lambda: moe.routed_mlp(
            jnp.zeros((3, 5)), routing, jnp.zeros((3, 5, 4)), jnp.zeros((3, 2, 5)), recipe=None
        ),
        r"routing.weights has shape \[4, 3\] .*; give float32 \[4, 2\]": lambda: moe.combine(
            jnp.zeros((8, 5)), replace(routing, weights=jnp.ones((4, 3)))
        ),
        "routing.weights has .* dtype bfloat16; give float32": lambda: moe.row_weights(
            replace(routing, weights=routing.weights.astype(jnp.bfloat16))
        ),
    }
    for sentence, call in cases.items():
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(call)
    with pytest.raises(ValueError, match="2\\^31 rows"):
        jax.eval_shape(lambda: moe.route(jnp.zeros((1 << 30, 4), jnp.bfloat16), 2))


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 256), ("int8", 128), ("int16", 1 << 15), ("uint16", 1 << 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_narrow_integers_name_every_expert(dtype: str, experts: int, masked: bool, rng: np.random.Generator) -> None:
    """The number of experts is no number of such a dtype: it may not wrap to 0 and drop or misplace every choice."""
    chosen = rng.integers(0, min(experts, 4000), (9, 2))
    weights = jnp.asarray(rng.random((9, 2)), jnp.float32)
    mask = jnp.asarray(rng.random(9) < 0.7) if masked else None
    wide = moe.arrange(jnp.asarray(chosen, jnp.int32), weights, experts, mask=mask)
    for numbers in (chosen.astype(dtype), jnp.asarray(chosen, dtype)):
        narrow = moe.arrange(numbers, weights, experts, mask=mask)
        for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
    kept = np.asarray(mask).repeat(2) if masked else np.full(18, True)
    assert np.array_equal(narrow.group_sizes, np.bincount(chosen.reshape(-1)[kept], minlength=experts))


@pytest.mark.parametrize("number", [-(2**63), -(2**32), 2**32 + 1, 2**63 - 1])
def test_wide_numbers_of_no_expert_go_nowhere(number: int) -> None:
    """int64 of numpy whose lower halves are experts' numbers: neither arrange nor a replay takes them for those."""
    choices = np.array([[number, 1], [0, number]], np.int64)
    expected = np.array([1, 1, 0], np.int32)
    assert np.array_equal(moe.arrange(choices, jnp.ones((2, 2)), 3).group_sizes, expected)
    replayed = choose_experts(jnp.zeros((2, 3)), 2, replay=choices)
    assert np.array_equal(replayed.counts, expected)
    assert np.array_equal(np.asarray(replayed.choices) == choices, choices != number)


def test_weights_of_choices_that_are_left_out_have_no_gradient(rng: np.random.Generator) -> None:
    """Such a choice has no row: what lies past the sum of the sizes, or past a limit of rows, is never its gradient.
    The others have their row's product with dy, and with their row's factor."""
    tokens, experts, k, width = 9, 4, 2, 5
    chosen = rng.integers(0, experts, (tokens, k)).astype(np.int32)
    chosen[rng.random((tokens, k)) < 0.4] = -1
    chosen[0] = -1, 2
    weights, dy = rng.random((tokens, k)).astype(np.float32), rng.standard_normal((tokens, width)).astype(np.float32)
    total = int((chosen >= 0).sum())
    for limit in (None, total - 2):
        kept = jax.jit(partial(moe.arrange, num_experts=experts, rows=limit))(chosen, weights)
        left_out = np.ones(tokens * k, bool)
        left_out[np.asarray(kept.order)[: int(np.sum(kept.group_sizes))]] = False
        assert np.array_equal(kept.weights, np.where(left_out.reshape(tokens, k), 0, weights))
        rows = np.full((tokens * k if limit is None else limit, width), np.nan, np.float32)
        end = min(total, len(rows))
        rows[:end] = rng.standard_normal((end, width))
        factors = np.where(np.arange(len(rows)) < end, rng.random(len(rows)), np.nan).astype(np.float32)

        @jax.jit
        def gradients(weights: Any, rows: Any = rows, factors: Any = factors, limit: int | None = limit) -> Any:
            def both(weights: Any) -> tuple[Any, Any]:
                routing = moe.arrange(jnp.asarray(chosen), weights, experts, rows=limit)
                return moe.combine(jnp.asarray(rows), routing), moe.row_weights(routing)

            _, pull = jax.vjp(both, weights)
            zero = jnp.zeros_like(dy), jnp.zeros_like(factors)
            return (
                pull((jnp.asarray(dy), zero[1])),
                pull((zero[0], jnp.asarray(factors))),
                moe.arrange(jnp.asarray(chosen), weights, experts),
            )

        (of_y,), (of_factors,), routing = gradients(weights)

        # weights that no `arrange` has masked
        @jax.jit
        def alone(factors: Any, kept: moe.Routing = kept) -> Any:
            return jax.vjp(lambda own: moe.row_weights(replace(kept, weights=own)), weights)[1](factors)[0]

        assert np.array_equal(alone(factors), of_factors)
        position = np.asarray(routing.position)
        for token, choice in np.ndindex(tokens, k):
            here = position[token, choice]
            inside = here < end
            assert of_factors[token, choice] == (factors[here] if inside else 0)
            wanted = np.dot(rows[here].astype(np.float64), dy[token]) if inside else 0
            largest = np.abs(rows[here] * dy[token]).max() if inside else 0
            assert abs(of_y[token, choice] - wanted) <= SUMS * largest
