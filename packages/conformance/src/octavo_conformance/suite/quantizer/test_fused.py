"""Fused quantizers: an activation, its gradient or a normalization, rounded once, then quantized by the definition."""

from __future__ import annotations

import numpy as np

from octavo_conformance.cards.fused_variants import of_activations, of_gradients, of_norms, one_gradient
from octavo_conformance.cards.needs import needs, needs_the_rest
from octavo_conformance.oracles.checks import assert_same_bits, assert_zeros
from octavo_conformance.oracles.functions import activated, activated_gradient, normalized, width
from octavo_conformance.oracles.fused import (
    FEATURES,
    GROUPS,
    activated_of,
    assert_column_sums,
    assert_near,
    assert_quantized,
    assert_repeats,
    assert_row_products,
    call,
    draw_inputs,
    values_alone,
)
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import Rng


@needs("act_quantize", of_activations)
def test_activation_and_quantize(case: Case, rng: Rng, measure: Measure) -> None:
    """The activation is within its bound, the codes are the definition's of it, a NaN tail reaches neither (faults 8,
    14)."""
    _check_activation(case, rng, measure)


@needs_the_rest("act_quantize")
def test_activation_of_what_else_is_declared(case: Case, rng: Rng, measure: Measure) -> None:
    """Recipes and dtypes that the card declares and the selection leaves out: whatever is declared is tried."""
    _check_activation(case, rng, measure)


def _check_activation(case: Case, rng: Rng, measure: Measure) -> None:
    inputs = draw_inputs(case, rng)
    x, probs, total = inputs.rows(width(case.function, FEATURES)), inputs.probs(), inputs.total
    tensor, extras = call(case, inputs, FEATURES, [x], probs=probs)
    activation = activated_of(case, inputs, extras, FEATURES)
    exact = activated(x[:total], case.function, None if probs is None else probs[:total])
    assert_near(activation[:total], exact, "activated", measure)
    assert_quantized(case, inputs, tensor, extras, activation)


@needs("dact_quantize", of_gradients)
def test_gradient_and_quantize(case: Case, rng: Rng, measure: Measure) -> None:
    """So is the gradient; dbias is the sum of the rounded gradient without the tail, and repeats, and so is dprobs
    (faults 8, 11, 12)."""
    _check_gradient(case, rng, measure)


@needs_the_rest("dact_quantize")
def test_gradient_of_what_else_is_declared(case: Case, rng: Rng, measure: Measure) -> None:
    """Recipes and dtypes that the card declares and the selection leaves out: whatever is declared is tried."""
    _check_gradient(case, rng, measure)


def _check_gradient(case: Case, rng: Rng, measure: Measure) -> None:
    inputs = draw_inputs(case, rng)
    columns, total = width(case.function, FEATURES), inputs.total
    x, dy, probs = inputs.rows(columns), inputs.rows(FEATURES), inputs.probs()
    tensor, extras = call(case, inputs, columns, [dy, x], probs=probs)
    activation = activated_of(case, inputs, extras, columns)
    exact = activated_gradient(dy[:total], x[:total], case.function, None if probs is None else probs[:total])
    assert_near(activation[:total], exact, "gradient", measure)
    assert_quantized(case, inputs, tensor, extras, activation)
    dbias = assert_column_sums(case, inputs, extras, activation, measure)
    assert_row_products(case, inputs, extras, dy, activated(x[:total], case.function, None), measure)
    again = call(case, inputs, columns, [dy, x], probs=probs, wanted=("dbias", "dprobs"))[1]
    assert_repeats(case.numpy(again.dbias), dbias, "dbias")
    if getattr(extras, "dprobs", None) is not None:
        assert_repeats(case.numpy(again.dprobs), case.numpy(extras.dprobs), "dprobs")


@needs("act_quantize", of_activations)
def test_activation_without_codes(case: Case, rng: Rng) -> None:
    """Where the answer has a function for values alone, it gives the bits that are quantized elsewhere."""
    inputs = draw_inputs(case, rng)
    x, probs, total = inputs.rows(width(case.function, FEATURES)), inputs.probs(), inputs.total
    alone = values_alone(case, "act_quantize", inputs, FEATURES, [x], probs=probs)
    _, extras = call(case, inputs, FEATURES, [x], probs=probs, wanted=("activated",))
    beside = activated_of(case, inputs, extras, FEATURES)
    assert_same_bits(case.numpy(alone.activated)[:total], beside[:total], "activated")


@needs("dact_quantize", of_gradients)
def test_gradient_without_codes(case: Case, rng: Rng) -> None:
    """So it is of the gradient, which may have the activation's own bits beside it where they are wanted."""
    inputs = draw_inputs(case, rng)
    columns, total = width(case.function, FEATURES), inputs.total
    x, dy, probs = inputs.rows(columns), inputs.rows(FEATURES), inputs.probs()
    wanted = ("activated", "dbias", "dprobs")
    alone = values_alone(case, "dact_quantize", inputs, columns, [dy, x], probs=probs, wanted=wanted)
    _, extras = call(case, inputs, columns, [dy, x], probs=probs)
    beside = activated_of(case, inputs, extras, columns)
    assert_same_bits(case.numpy(alone.activated)[:total], beside[:total], "activated")
    assert_same_bits(case.numpy(alone.dbias), case.numpy(extras.dbias), "dbias")
    if getattr(extras, "dprobs", None) is not None:
        assert_same_bits(case.numpy(alone.dprobs), case.numpy(extras.dprobs), "dprobs")
    few = values_alone(case, "dact_quantize", inputs, columns, [dy, x], probs=probs, wanted=("activated", "forward"))
    assert_same_bits(case.numpy(few.activated)[:total], beside[:total], "activated alone")
    assert few.dbias is None, "there is a dbias, which wanted= did not name"
    if few.forward is not None:
        forward = values_alone(case, "act_quantize", inputs, FEATURES, [x], probs=probs)
        assert_same_bits(case.numpy(few.forward)[:total], case.numpy(forward.activated)[:total], "forward")


@needs("norm_quantize", of_norms)
def test_normalization_and_quantize(case: Case, rng: Rng, measure: Measure) -> None:
    """Rows, rstd and mean are within their bounds, the codes are the definition's (fault 8)."""
    _check_norm(case, rng, measure)


@needs_the_rest("norm_quantize")
def test_normalization_of_what_else_is_declared(case: Case, rng: Rng, measure: Measure) -> None:
    """Recipes and dtypes that the card declares and the selection leaves out: whatever is declared is tried."""
    _check_norm(case, rng, measure)


def _check_norm(case: Case, rng: Rng, measure: Measure) -> None:
    inputs = draw_inputs(case, rng)
    x, gamma, total, epsilon = inputs.rows(FEATURES), inputs.vector(FEATURES), inputs.total, 1e-3
    beta = inputs.vector(FEATURES) if case.function == "layer" else None
    wanted = ("activated", "amax", "mean", "rstd")
    tensor, extras = call(case, inputs, FEATURES, [x, gamma, beta], epsilon=epsilon, wanted=wanted)
    activation = activated_of(case, inputs, extras, FEATURES)
    exact = normalized(x[:total], gamma, beta, case.function, epsilon)
    assert_near(activation[:total], exact.y, "normalized", measure)
    assert_near(case.numpy(extras.rstd)[:total], exact.rstd, "rstd", measure)
    if exact.mean is not None:
        assert_near(case.numpy(extras.mean)[:total], exact.mean, "mean", measure)
    assert_quantized(case, inputs, tensor, extras, activation)


@needs("dact_quantize", one_gradient)
def test_all_groups_empty(case: Case, rng: Rng) -> None:
    """Nothing but tail: dbias is exactly zero (faults 1, 3)."""
    inputs = draw_inputs(case, rng, np.zeros(GROUPS, np.int32))
    columns = width(case.function, FEATURES)
    _, extras = call(case, inputs, columns, [inputs.rows(FEATURES), inputs.rows(columns)])
    assert_zeros(case.numpy(extras.dbias), "dbias of groups without rows")


@needs("act_quantize", one_gradient, graph_safe=True)
def test_fused_quantizers_read_no_value(case: Case, rng: Rng) -> None:
    """A graph-safe fused quantizer with device sizes never waits for them (fault 36)."""
    inputs = draw_inputs(case, rng)
    plan = case.plan("act_quantize", k=FEATURES, groups=GROUPS, sizes="device")
    x = case.array(inputs.rows(width(case.function, FEATURES)))
    reads = case.bridge.host_reads(
        lambda x, sizes: plan.run(x, sizes, operand="x")[0].rowwise, x, case.sizes(inputs.sizes)
    )
    assert not reads, f"act_quantize waits for values: {', '.join(reads)}"
