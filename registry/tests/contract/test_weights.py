"""How w lies in memory: read so where the backends that would serve its transposed copy can, else transposed."""

from __future__ import annotations

from typing import Any

import pytest

import octavo
from octavo_registry import LayerPlan
from octavo_registry.contract.weights import as_it_lies, readers

BOTH = frozenset({"nk", "kn"})
GEMMS = {"fprop", "dgrad", "wgrad"}


def _gemms(fakes: Any, name: str, weights: frozenset[str], layouts: dict[str, str] | None = None, **card: Any) -> Any:
    rows = [fakes.row(ops=GEMMS, weights=weights), fakes.row(ops={"quantize"}, layouts={"plain", "rows", "panels"})]
    return fakes.plugin(name, fakes.Backend(layouts=layouts or {}), rows=rows, **card)


def _names(layer: LayerPlan) -> set[str]:
    return {plan.backend for plan in layer.plans}


def test_a_kernel_is_read_as_it_lies(fakes: Any) -> None:
    """Every GEMM is asked for it as [G, K, N]; the quantizer sees rows of K and columns of N, and planes trade readers.

    The layer's description and each request say so.
    """
    registry = fakes.registry(_gemms(fakes, "a", BOTH, {"w": "panels"}))
    layer = registry.plan_layer(fakes.request(weight="kn"))
    assert not layer.transposes
    assert {plan.request.weight for plan in (layer.fprop, layer.dgrad, layer.wgrad) if plan} == {"kn"}
    assert layer.quantize_w is not None
    asked = layer.quantize_w.request
    assert (asked.n, asked.k, asked.weight) == (64, 32, "nk")
    assert "w read as [G, K, N]" in str(layer).splitlines()[0]
    assert "w as [G, K, N]" in str(layer.fprop)
    assert registry.plan_layer(fakes.request(weight="kn")) is layer
    assert readers("w", "kn") == ("dgrad", "fprop")
    assert readers("x", "kn") == readers("x", "nk") == ("fprop", "wgrad")


def test_the_planes_that_are_asked_for(fakes: Any) -> None:
    """Forward only: of w as [G, N, K] the rows, of [G, K, N] the columns, in the layout that fprop wants."""
    registry = fakes.registry(_gemms(fakes, "a", BOTH, {"w": "rows"}))
    found = []
    for weight in ("nk", "kn"):
        layer = registry.plan_layer(fakes.request(weight=weight, training=False))
        assert layer.quantize_w is not None
        request = layer.quantize_w.request
        assert request.quantizer is not None
        found.append((request.quantizer.orientation, request.layouts))
    assert found == [("rowwise", ("rows", "plain")), ("columnwise", ("plain", "rows"))]
    spec = octavo.MXFP8().quantizer("w")
    assert spec is not None
    assert as_it_lies(spec, "w", "kn") == spec


def test_who_runs_a_layer_does_not_depend_on_how_its_kernel_lies(fakes: Any) -> None:
    """A backend that comes first and knows [G, N, K] alone is not passed over: the front end transposes for it."""
    registry = fakes.registry(_gemms(fakes, "best", frozenset({"nk"}), priority=9), _gemms(fakes, "other", BOTH))
    layer = registry.plan_layer(fakes.request(weight="kn"))
    assert layer.transposes
    assert _names(layer) == {"best"}
    assert "w [G, K, N] transposed to [G, N, K] and dw back" in str(layer).splitlines()[0]
    asked = registry.plan_layer(fakes.request(weight="kn"), backend="other")
    assert not asked.transposes
    assert _names(asked) == {"other"}
    assert not registry.plan_layer(fakes.request()).transposes


def test_a_refusal_names_both_shapes(fakes: Any) -> None:
    """`octavo why` of a GEMM on such a kernel says what the backend takes and how the kernel lies."""
    registry = fakes.registry(_gemms(fakes, "a", frozenset({"nk"})))
    (decision,) = registry.explain(fakes.request(weight="kn"))
    assert decision.verdict == "refused"
    assert decision.reason == "takes w as [G, N, K], it lies in memory as [G, K, N]"
    with pytest.raises(octavo.NoBackendError, match=r"fprop in mxfp8 for torch on cpu, w as \[G, K, N\]"):
        registry.plan(fakes.request(weight="kn"))


def test_dtypes_that_the_fprop_request_leaves_open(fakes: Any) -> None:
    """dw, dx and w each have a dtype of their own; operands that no slot quantizes have that of the products."""
    registry = fakes.registry(fakes.plugin("a"))
    request = fakes.request(recipe=octavo.MXFP8(wgrad="high_precision"), out_dtype="float32")
    layer = registry.plan_layer(
        request, wgrad_dtype="float16", dgrad_dtype="bfloat16", w_dtype="float32", product_dtype="bfloat16"
    )
    assert layer.dgrad is not None
    assert layer.wgrad is not None
    assert layer.quantize_w is not None
    assert layer.quantize_w.request.in_dtype == "float32"
    assert layer.dgrad.request.out_dtype == "bfloat16"
    wgrad = layer.wgrad.request
    assert (wgrad.in_dtype, wgrad.other_dtype, wgrad.out_dtype) == ("bfloat16", None, "float16")
