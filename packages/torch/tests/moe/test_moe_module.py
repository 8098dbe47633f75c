"""The router against its definition, and MoE: a module that routes, multiplies and combines."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moe_layers import REFERENCE, assert_equal

import octavo_numerics
from octavo import NVFP4, BlockScaling, DelayedScaling, Recipe
from octavo_torch import MoE, choose_experts, moe_mlp, router_losses, update_scales

T, E, C, K, F = 24, 12, 3, 64, 48
FP32 = 2**-20
"""Sixteen units of fp32: sums of at most E = 12 scores, a quotient, and functions that are right to a unit or two."""
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as it is": {"renormalize": False},
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
}


@pytest.mark.parametrize("name", RULES)
def test_router_is_its_definition(name: str, rng: np.random.Generator) -> None:
    """Choices, ties to the lower index, weights, counts, losses, and replayed choices."""
    rule = octavo_numerics.RouterRule(C, **RULES[name])
    # Steps of a quarter tie often, and their scores are equal in any arithmetic. No two sums of scores tie by an
    # identity that rounding breaks, such as sigmoid(x) + sigmoid(-x) = 1: logits are zero or more, and a group's
    # experts have one bias, for (a + 1) + b and a + (b + 1) are rounded apart.
    logits = torch.from_numpy(rng.integers(0, 17, (T, E)) / 4).float().requires_grad_()
    bias = torch.from_numpy(np.repeat(rng.integers(-2, 3, 4) / 4, E // 4)).float() if rule.groups > 1 else None
    array, added = logits.detach().numpy(), None if bias is None else bias.numpy()
    replay = torch.from_numpy(np.stack([rng.permutation(E)[:C] for _ in range(T)]))
    replay[3, 1] = -1
    for given in (None, replay):
        made = choose_experts(logits, C, bias=bias, replay=given, backend=REFERENCE, **RULES[name])
        wanted = octavo_numerics.choose_experts(array, rule, added, None if given is None else given.numpy())
        assert np.array_equal(made.choices.numpy(), wanted.choices)
        assert np.array_equal(made.counts.numpy(), wanted.counts)
        np.testing.assert_allclose(made.weights.detach().numpy(), wanted.weights, rtol=FP32)
        (grad,) = torch.autograd.grad(made.weights.square().sum(), logits)
        assert bool(grad.isfinite().all())
        assert bool(grad.any())
        score = RULES[name].get("score", "softmax")
        losses = router_losses(logits, made.choices, score=score, sequences=4)
        expected = octavo_numerics.router_losses(array, wanted, score, sequences=4)
        for loss, value in losses._asdict().items():
            np.testing.assert_allclose(value.item(), expected[loss], rtol=FP32)


def test_groups_are_kept_by_their_two_largest_scores(rng: np.random.Generator) -> None:
    """Two good experts (0.88 each) are worth more than the best one and a middling one (0.98 and 0.5)."""
    of_groups = np.array([[4.0, 0.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    logits = rng.permuted(np.stack([rng.permutation(of_groups) for _ in range(T)]), axis=2).reshape(T, E)
    made = choose_experts(
        torch.from_numpy(logits).float(), 2, score="sigmoid", groups=4, kept_groups=1, backend=REFERENCE
    )
    assert made.choices.tolist() == [np.flatnonzero(row == 2.0).tolist() for row in logits]


@pytest.mark.parametrize("name", RULES)
def test_a_rank_without_tokens_chooses_nothing(name: str) -> None:
    """No choices, counts of zero, and losses and gradients that are zero and not NaN: a mean over no token is one."""
    logits = torch.zeros(0, E, requires_grad=True)
    rule = octavo_numerics.RouterRule(C, **RULES[name])
    made, wanted = (
        choose_experts(logits, C, backend=REFERENCE, **RULES[name]),
        octavo_numerics.choose_experts(np.zeros((0, E)), rule),
    )
    assert made.choices.shape == wanted.choices.shape == made.weights.shape == (0, C)
    assert made.counts.tolist() == wanted.counts.tolist() == [0] * E
    score = RULES[name].get("score", "softmax")
    losses = router_losses(logits, made.choices, score=score, sequences=2)
    assert {key: value.item() for key, value in losses._asdict().items()} == octavo_numerics.router_losses(
        np.zeros((0, E)), wanted, score, sequences=2
    ) == {"z": 0, "aux": 0, "sequence": 0}  # fmt: skip
    (grad,) = torch.autograd.grad(sum(losses), logits)
    assert grad.shape == logits.shape


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_at_scores_that_underflow(name: str, rng: np.random.Generator) -> None:
    """A logit far below the others has a score of zero and a gradient of zero, not NaN. All of a token's may be so: the
    losses of balance have their shares nonetheless, which were once NaN."""
    logits = torch.where(torch.rand(T, E) < 0.3, torch.tensor(-300.0), torch.randn(T, E))
    logits[0] = -300
    logits.requires_grad_()
    made = choose_experts(logits, C, backend=REFERENCE, **RULES[name])
    score = RULES[name].get("score", "softmax")
    losses = router_losses(logits, made.choices, score=score)
    wanted = octavo_numerics.Choice(made.choices.numpy(), made.weights.detach().numpy(), made.counts.numpy())
    expected = octavo_numerics.router_losses(logits.detach().numpy(), wanted, score)
    # FP32 as above: a rounded difference of logits d moves a share, e^-d of the largest, by d units of it: 0.37 at most
    for loss, value in losses._asdict().items():
        np.testing.assert_allclose(value.item(), expected[loss], rtol=FP32)
    assert bool(made.weights.isfinite().all())
    (grad,) = torch.autograd.grad(made.weights.square().sum() + sum(losses), logits)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("renormalize", [True, False])
def test_roots_of_softplus_that_underflow_weigh_as_defined(renormalize: bool, rng: np.random.Generator) -> None:
    """Down to a logit of -174, where fp32 holds no softplus but its root: a token whose logits were all below -104 once
    weighed 0, and its experts' results were gone."""
    logits = (rng.uniform(-190, -10, (T, 1)) - 4 * rng.random((T, E))).astype(np.float32)
    rule = octavo_numerics.RouterRule(C, "sqrtsoftplus", renormalize=renormalize)
    given = torch.from_numpy(logits).requires_grad_()
    made = choose_experts(given, C, score="sqrtsoftplus", renormalize=renormalize, backend=REFERENCE)
    wanted = octavo_numerics.choose_experts(logits, rule)
    assert np.array_equal(made.choices.numpy(), wanted.choices)
    bound = octavo_numerics.choice_weights_bound(logits, wanted, rule)
    assert (np.abs(made.weights.detach().numpy() - wanted.weights) <= bound).all()
    dweights = rng.uniform(-1, 1, wanted.choices.shape).astype(np.float32)
    (gradient,) = torch.autograd.grad(made.weights, given, torch.from_numpy(dweights))
    defined = octavo_numerics.choose_gradient(logits, wanted.choices, dweights, rule)
    bound = octavo_numerics.choose_gradient_bound(logits, wanted.choices, dweights, rule)
    assert (np.abs(gradient.numpy() - defined) <= bound).all()


def test_a_logit_that_is_no_number_is_seen() -> None:
    """Its token's weights are NaN in every score, and other tokens' are not; the root of softplus once made it 0."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 2.0]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        weights = choose_experts(logits, 3, score=score, backend=REFERENCE).weights  # type: ignore[arg-type]
        assert weights.isnan().all(1).tolist() == [False, True]
        assert bool(weights[0].isfinite().all())


def test_experts_are_in_the_order_of_their_logits(rng: np.random.Generator) -> None:
    """Where nothing else decides: two scores that round to one are no tie, and zeros of both signs are one. Once the
    choices of such logits were those of whoever rounded the scores."""
    logits = torch.tensor([[40.0, 41.0, 39.0, 42.0], [-200.0, -300.0, 0.0, -150.0], [-0.0, 0.0, -1.0, -2.0]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        made = choose_experts(logits, 3, score=score, backend=REFERENCE)  # type: ignore[arg-type]
        assert made.choices.tolist() == [[3, 1, 0], [2, 3, 0], [0, 1, 2]]
        wanted = octavo_numerics.choose_experts(logits.numpy(), octavo_numerics.RouterRule(3, score))  # type: ignore[arg-type]
        assert wanted.choices.tolist() == made.choices.tolist()


def test_router_says_what_does_not_fit() -> None:
    """Errors name the argument, what was given, and what is needed."""
    logits = torch.zeros(4, 8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": 9}, "k is 9 and a token has 8 of 8 experts"),
        ({"groups": 3}, "groups is 3, kept_groups 1, and there are 8 experts"),
        ({"groups": 4, "k": 3}, "k is 3 and a token has 2 of 8 experts to choose from, as groups is 4"),
        ({"score": "tanh"}, "score is 'tanh'; give 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
        ({"bias": torch.zeros(7)}, r"bias is float32 \[7\]; give \[8\]"),
        ({"replay": torch.zeros(4, 1, dtype=torch.int64)}, r"replay has shape \[4, 1\] and k is 2; give \[4, 2\]"),
        ({"logits": logits.long()}, r"logits is int64 \[4, 8\]; give \[T, E\]"),
        ({"scale": float("nan")}, "scale is nan; give a number that is finite"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            choose_experts(**{"logits": logits, "k": 2, **changed})
    with pytest.raises(ValueError, match="sequences is 3 and there are 4 tokens"):
        router_losses(logits, torch.zeros(4, 2, dtype=torch.int64), sequences=3)


def make(recipe: Recipe, **more: Any) -> MoE:
    return MoE(E, K, F, C, recipe=recipe, dtype=torch.bfloat16, seed=3, backend=REFERENCE, **more)


@pytest.mark.parametrize("recipe", [BlockScaling(), NVFP4(), DelayedScaling(history=4)], ids=lambda one: one.kind)
def test_module_is_router_and_moe_mlp(recipe: Recipe, rng: np.random.Generator) -> None:
    """y and all gradients, the router's too; leading axes are kept; states and seeds move on as GroupedMLP's."""
    layer = make(recipe, bias=True, choice_bias=True, score="sigmoid")
    x = torch.randn(2, T, K).bfloat16().requires_grad_()
    tokens = x.reshape(-1, K)
    choice = layer.choose(tokens)
    states = copy.deepcopy(layer.states)
    seed = layer.seed
    y = moe_mlp(
        tokens, choice.choices, choice.weights, layer.weight1, layer.weight2, bias1=layer.bias1, bias2=layer.bias2,
        recipe=recipe, seed=None if seed is None else seed.current(), state=states, backend=REFERENCE,
    ).view(2, T, K)  # fmt: skip
    leaves = [x, *layer.parameters()]
    wanted = [y, *torch.autograd.grad(y.sum(), leaves)]
    for chosen_before in (False, True):
        twin = copy.deepcopy(layer.state_dict())
        own = layer(x, layer.choose(tokens) if chosen_before else None)
        assert_equal([own, *torch.autograd.grad(own.sum(), leaves)], wanted)
        if recipe.stateful:
            assert bool(layer.amax_history[:, :, 0].any())
        if recipe.stochastic:
            assert layer.seed_counter == 1
        layer.load_state_dict(twin)
    update_scales(layer)
    assert "k=3, score=sigmoid, form=standard" in repr(layer)
    with pytest.raises(ValueError, match=r"x is bfloat16 \[2, 24, 63\]; give tokens \[..., 64\]"):
        layer(x[..., 1:])


def test_k_has_an_old_name(rng: np.random.Generator) -> None:
    """`choices` gives the same layer with one warning. Both names are refused, and none; old pickles have k, too."""
    old: Any = MoE
    with pytest.warns(DeprecationWarning, match="choices is called k now") as said:
        layer = old(E, K, F, choices=C, recipe=None)
    assert [one.filename for one in said] == [__file__]
    assert repr(layer) == repr(MoE(E, K, F, C, recipe=None)) == repr(MoE(E, K, F, k=C, recipe=None))
    assert layer.choices == layer.k == C
    for both in (lambda: old(E, K, F, C, choices=C, recipe=None), lambda: old(E, K, F, k=C, choices=C, recipe=None)):
        with pytest.raises(TypeError, match="both were given; give k alone"):
            both()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'k'"):
        old(E, K, F, recipe=None)
    with pytest.warns(UserWarning, match="without a recipe") as said:
        MoE(E, K, F, C)
    assert [one.filename for one in said] == [__file__]
    x = torch.randn(T, K)
    pickled = copy.copy(layer)
    vars(pickled)["choices"] = vars(pickled).pop("k")
    assert torch.equal(pickle.loads(pickle.dumps(pickled))(x), layer(x))


def test_replayed_choices_give_the_same_result(rng: np.random.Generator) -> None:
    """Choices of one pass taken in another: the same y and gradients, whatever the bias for choosing has become."""
    layer = make(BlockScaling(), choice_bias=True)
    x = torch.randn(T, K).bfloat16()
    first = layer.choose(x)
    y = layer(x, first)
    layer.choice_bias.copy_(torch.randn(E))
    assert not torch.equal(layer.choose(x).choices, first.choices)
    assert torch.equal(layer(x, layer.choose(x, replay=first.choices)), y)
    assert torch.equal(layer(x, first, weights=layer.quantize_weights()), y)


CASTS: dict[str, Callable[[MoE], MoE]] = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(),
    "dtype": lambda layer: layer.to(torch.bfloat16),
    "device and dtype": lambda layer: layer.to("cpu", torch.float16),
    "like": lambda layer: layer.to(torch.empty(1, dtype=torch.bfloat16)),
    "inside of a model": lambda layer: (torch.nn.Sequential(layer).bfloat16(), layer)[1],
}


@pytest.mark.parametrize("way", CASTS)
def test_casting_leaves_the_bias_for_choosing_alone(way: str, rng: np.random.Generator) -> None:
    """Every cast means the parameters: buffers keep dtype and bits, those of a state dict that is loaded later, too."""
    layer = MoE(E, K, F, C, recipe=DelayedScaling(history=4), choice_bias=True, score="sigmoid")
    for name in ("choice_bias", "amax_history", "encode_scale"):
        layer.get_buffer(name).uniform_(0.1, 1)
    saved = copy.deepcopy(layer.state_dict())
    wide = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert CASTS[way](layer) is layer
    assert layer.router.dtype is layer.weight1.dtype is not torch.float32
    assert_equal([*layer.buffers()], [*wide.values()])
    layer.choice_bias.zero_()
    layer.load_state_dict(saved)
    assert_equal([*layer.buffers()], [*wide.values()])
    assert all(buffer.dtype is torch.float32 for buffer in layer.buffers())
    assert layer.to("meta").choice_bias.is_meta
    assert layer.choice_bias.dtype is torch.float32


def test_the_bias_for_choosing_has_values_after_to_empty() -> None:
    """Zeros where a checkpoint has none; those of a module that has values stay where it is moved."""
    layer = MoE(E, K, F, C, recipe=DelayedScaling(history=4), choice_bias=True, device="meta")
    memory = torch.full((E,), 77.0)
    del memory  # which to_empty may get
    layer.to_empty(device="cpu")
    assert not layer.choice_bias.any()
    assert bool((layer.encode_scale == 1).all())
    layer.choice_bias += 1
    assert bool((layer.cpu().bfloat16().choice_bias == 1).all())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_was_cast_leaves_buffers_wide(assign: bool) -> None:
    """A checkpoint in bf16 gives the buffers values and not its dtype, in which small steps of the bias are lost."""
    layer, other = (MoE(E, K, F, C, recipe=DelayedScaling(history=4), choice_bias=True, score="sigmoid") for _ in "ab")
    with torch.no_grad():
        for buffer in layer.buffers():
            buffer.copy_(torch.rand(buffer.shape) + 0.5)
    narrow = {name: value.bfloat16() for name, value in layer.state_dict().items()}
    other.load_state_dict(narrow, assign=assign)
    for name, buffer in other.named_buffers():
        assert buffer.dtype is torch.float32, name
        assert torch.equal(buffer, narrow[name].float()), name
    update_scales(other)
    other.choice_bias += torch.finfo(torch.bfloat16).eps / 16
    assert not torch.equal(other.choice_bias, narrow["choice_bias"].float())
