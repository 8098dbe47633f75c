"""Layers composed of what backends serve: quantizers make the layouts that the chosen GEMMs want."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

import octavo
from octavo import NoBackendError
from octavo_registry import LayerPlan, prefer
from octavo_registry.contract.quantize import BoundQuantize
from octavo_registry.contract.weights import as_it_lies
from octavo_registry.dispatch import rounding


def gemm(fakes: Any, name: str, ops: set[str], layouts: dict[str, str], **card: Any) -> Any:
    """A plugin that serves GEMMs and wants these layouts."""
    return fakes.plugin(name, fakes.Backend(layouts=layouts), rows=[fakes.row(ops=ops)], **card)


def quantizer(fakes: Any, name: str, layouts: set[str], **card: Any) -> Any:
    """A plugin that quantizes to any mixture of these layouts."""
    return fakes.plugin(name, rows=[fakes.row(ops={"quantize"}, layouts=layouts)], **card)


def backends(layer: LayerPlan) -> dict[str, str | None]:
    """Backend by operation."""
    names = ("fprop", "dgrad", "wgrad", "quantize_x", "quantize_w", "quantize_dy")
    return {name: plan.backend if (plan := getattr(layer, name)) else None for name in names}


def layouts(layer: LayerPlan, operand: str) -> tuple[str, str]:
    """(rowwise, columnwise) layouts that the operand's quantizer makes."""
    made: tuple[str, str] = getattr(layer, f"quantize_{operand}").request.layouts
    return made


def test_gemms_of_two_backends_wish_different_layouts_of_one_operand(fakes: Any) -> None:
    """X is read rowwise by fprop and columnwise by wgrad: one quantizer makes each plane as its GEMM wants it."""
    registry = fakes.registry(
        gemm(fakes, "forward", {"fprop"}, {"x": "panels", "w": "tiles"}, priority=100),
        gemm(fakes, "weights", {"wgrad"}, {"x": "swizzled", "dy": "swizzled"}, priority=50),
        gemm(fakes, "all", {"fprop", "dgrad", "wgrad"}, {}, priority=-100),
        quantizer(fakes, "makes", {"plain", "panels", "tiles", "swizzled"}),
    )
    layer = registry.plan_layer(fakes.request())
    assert backends(layer) == {
        "fprop": "forward",
        "dgrad": "all",
        "wgrad": "weights",
        "quantize_x": "makes",
        "quantize_w": "makes",
        "quantize_dy": "makes",
    }
    assert layouts(layer, "x") == ("panels", "swizzled")
    assert layouts(layer, "w") == ("tiles", "plain")
    assert layouts(layer, "dy") == ("plain", "swizzled")
    assert layer.quantize_w is not None
    assert layer.quantize_w.request.stacked
    assert layer.quantize_x is not None
    assert not layer.quantize_x.request.stacked
    assert registry.plan_layer(fakes.request()) is layer
    text = str(layer)
    assert text.splitlines()[0] == f"grouped linear in mxfp8 ({octavo.MXFP8().fingerprint}) for torch on cpu"
    assert "  quantize x   makes    mxfp8  rowwise panels, columnwise swizzled" in text.splitlines()
    assert [plan.request.op for plan in layer.plans] == ["quantize"] * 3 + ["fprop", "dgrad", "wgrad"]


def test_a_gemm_whose_layout_nobody_makes_is_passed_over_with_the_reason(fakes: Any) -> None:
    """contract.md, promise 4: a better GEMM that cannot be fed is a refusal in the plan's decisions, nothing silent."""
    registry = fakes.registry(
        gemm(fakes, "fast", {"fprop", "wgrad"}, {"x": "panels"}, priority=100),
        gemm(fakes, "slow", {"fprop", "dgrad", "wgrad"}, {}, priority=-100),
        quantizer(fakes, "makes", {"plain"}),
    )
    assert registry.plan(fakes.request()).backend == "fast"
    layer = registry.plan_layer(fakes.request())
    assert backends(layer)["fprop"] == "slow"
    assert backends(layer)["wgrad"] == "slow"
    fast, slow = layer.fprop.decisions[:2]
    assert (fast.backend, fast.verdict) == ("fast", "refused")
    assert "needs x in layout 'panels', and nothing serves quantize in mxfp8" in fast.reason
    assert (slow.backend, slow.verdict) == ("slow", "chosen")
    assert registry.plan(fakes.request()).backend == "fast"


def test_the_fprop_keeps_its_backend_when_one_of_two_gemms_must_yield(fakes: Any) -> None:
    """No quantizer makes both layouts at once: the combination with the smallest sum of places wins, fprop first."""
    registry = fakes.registry(
        gemm(fakes, "one", {"fprop"}, {"x": "a"}, priority=9),
        gemm(fakes, "two", {"wgrad"}, {"x": "b"}, priority=9),
        gemm(fakes, "all", {"fprop", "dgrad", "wgrad"}, {}, priority=-100),
        quantizer(fakes, "makes-a", {"plain", "a"}),
        quantizer(fakes, "makes-b", {"plain", "b"}),
    )
    layer = registry.plan_layer(fakes.request())
    assert backends(layer)["fprop"] == "one"
    assert backends(layer)["wgrad"] == "all"
    assert backends(layer)["quantize_x"] == "makes-a"
    assert layouts(layer, "x") == ("a", "plain")


def test_the_fprop_yields_where_nothing_else_helps(fakes: Any) -> None:
    """Of two GEMMs that read w the one with another backend yields, the fprop not excepted."""
    registry = fakes.registry(
        gemm(fakes, "one", {"fprop"}, {"w": "a"}, priority=9),
        gemm(fakes, "two", {"dgrad"}, {"w": "b"}, priority=9),
        gemm(fakes, "all", {"fprop", "wgrad"}, {}, priority=-100),
        quantizer(fakes, "makes-a", {"plain", "a"}),
        quantizer(fakes, "makes-b", {"plain", "b"}),
    )
    layer = registry.plan_layer(fakes.request())
    assert (backends(layer)["fprop"], backends(layer)["dgrad"]) == ("all", "two")
    assert layouts(layer, "w") == ("plain", "b")


def test_random_layers_are_the_best_that_exhaustion_finds(fakes: Any, rng: random.Random) -> None:
    """Every combination of backends is tried here; compose must find one with the same, smallest sum of places."""
    for _ in range(40):
        names = [f"g{i}" for i in range(3)]
        kinds = ["plain", "p", "q"]
        wants = {name: {operand: rng.choice(kinds) for operand in ("x", "w", "dy")} | {"": ""} for name in names}
        makes = {f"q{i}": {"plain", *rng.sample(kinds, rng.randrange(1, 3))} for i in range(2)}
        registry = fakes.registry(
            *(
                gemm(fakes, name, {"fprop", "dgrad", "wgrad"}, {k: v for k, v in wants[name].items() if k}, priority=-i)
                for i, name in enumerate(names)
            ),
            *(quantizer(fakes, name, made) for name, made in makes.items()),
        )

        def feasible(f: str, d: str, w: str, wants: Any = wants, makes: Any = makes) -> bool:
            planes = [(wants[f]["x"], wants[w]["x"]), (wants[f]["w"], wants[d]["w"]), (wants[d]["dy"], wants[w]["dy"])]
            return all(any({*plane} <= made for made in makes.values()) for plane in planes)

        sums = [
            sum(names.index(name) for name in combination)
            for combination in itertools.product(names, repeat=3)
            if feasible(*combination)
        ]
        if not sums:
            with pytest.raises(NoBackendError, match="nothing here runs quantize in mxfp8"):
                registry.plan_layer(fakes.request())
            continue
        found = backends(registry.plan_layer(fakes.request()))
        chosen = [str(found[name]) for name in ("fprop", "dgrad", "wgrad")]
        assert feasible(*chosen)
        assert sum(names.index(name) for name in chosen) == min(sums)


def test_slots_decide_what_is_quantized(fakes: Any) -> None:
    """A high-precision slot multiplies unquantized operands: no plane is made for it, and its GEMM is planned so."""
    registry = fakes.registry(fakes.plugin("a"))
    recipe = octavo.MXFP8(dgrad="high_precision", wgrad="high_precision")
    layer = registry.plan_layer(fakes.request(recipe=recipe))
    assert layer.recipe is recipe
    assert layer.fprop.request.kind == "mxfp8"
    assert layer.dgrad is not None
    assert layer.dgrad.request.kind == "high_precision"
    assert layer.quantize_dy is None
    assert layer.quantize_x is not None
    spec = layer.quantize_x.request.quantizer
    assert spec is not None
    assert spec.orientation == "rowwise"
    bf16 = registry.plan_layer(fakes.request(recipe=octavo.HighPrecision()))
    assert backends(bf16) == {
        "fprop": "a", "dgrad": "a", "wgrad": "a", "quantize_x": None, "quantize_w": None, "quantize_dy": None,
    }  # fmt: skip


def test_folded_products_are_served_by_whoever_serves_blocks(fakes: Any) -> None:
    """MXFP8 with folded products asks for blocks with power-of-two scales, so that a card from before it serves it or
    refuses it, and cannot take its operands for MX ones; the plan, and the refusal, name both recipes."""
    recipe = octavo.MXFP8(products="folded", wgrad="high_precision")
    rows = [fakes.row(recipes={"block", "high_precision"})]
    layer = fakes.registry(fakes.plugin("a", rows=rows)).plan_layer(fakes.request(recipe=recipe))
    assert layer.recipe is recipe
    assert layer.fprop.request.recipe == octavo.BlockScaling(wgrad="high_precision")
    assert [plan.request.kind for plan in layer.plans] == ["block"] * 5 + ["high_precision"]
    name = f"mxfp8 ({recipe.fingerprint}), computed as block"
    assert str(layer).startswith(f"grouped linear in {name} for torch on cpu")
    with pytest.raises(
        octavo.NoBackendError, match=r"serves fprop in high_precision, mxfp8, the recipe is block"
    ) as no:
        fakes.registry(fakes.plugin("a")).plan_layer(fakes.request(recipe=recipe))
    assert str(no.value).endswith(f"The layer's recipe is {name}")


def test_a_layer_says_whether_a_row_depends_on_its_batch(fakes: Any) -> None:
    """It does where the recipe takes a scale from all rows of a group, and may where the card promises no order of
    sums; whoever compares a sampler with its trainer has to know which."""
    recipes = {"block", "current", "high_precision", "mxfp8", "nvfp4"}
    promised = fakes.registry(fakes.plugin("a", rows=[fakes.row(recipes=recipes, batch_invariant=True)]))
    silent = fakes.registry(fakes.plugin("a", rows=[fakes.row(recipes=recipes)]))
    for recipe, invariant in (
        (octavo.BlockScaling(), True),
        (octavo.MXFP8(products="folded"), True),
        (octavo.NVFP4(fprop="high_precision"), True),
        (octavo.NVFP4(), False),
        (octavo.CurrentScaling(), False),
    ):
        layer = promised.plan_layer(fakes.request(recipe=recipe))
        assert layer.batch_invariant is invariant
        ends = "same bits in every batch." if invariant else "takes a scale from all rows of a group."
        assert str(layer).endswith(ends)
        quiet = silent.plan_layer(fakes.request(recipe=recipe))
        assert not quiet.batch_invariant
        assert str(quiet).endswith("a promises no order of sums." if invariant else ends)


def test_inference_plans_the_forward_alone(fakes: Any) -> None:
    """No dgrad, no wgrad, and no columnwise plane that nobody would read."""
    layer = fakes.registry(fakes.plugin("a")).plan_layer(fakes.request(training=False))
    assert layer.dgrad is None
    assert layer.wgrad is None
    assert layer.quantize_dy is None
    for plan in (layer.quantize_x, layer.quantize_w):
        assert plan is not None
        assert plan.request.quantizer is not None
        assert plan.request.quantizer.orientation == "rowwise"
    only_backward = octavo.MXFP8(fprop="high_precision")
    layer = fakes.registry(fakes.plugin("a")).plan_layer(fakes.request(recipe=only_backward, training=False))
    assert layer.quantize_x is None


def test_shapes_and_dtypes_of_the_parts(fakes: Any) -> None:
    """dY has n columns and y's dtype, dx has x's; dw takes the asked dtype, else the recipe's, else x's."""
    registry = fakes.registry(fakes.plugin("a"))
    request = fakes.request(in_dtype="bfloat16", out_dtype="float32")
    layer = registry.plan_layer(request)
    assert layer.quantize_dy is not None
    assert layer.quantize_w is not None
    assert layer.dgrad is not None
    assert layer.wgrad is not None
    assert (layer.quantize_dy.request.k, layer.quantize_dy.request.in_dtype) == (32, "float32")
    assert (layer.quantize_w.request.k, layer.quantize_w.request.n) == (64, 32)
    assert (layer.dgrad.request.in_dtype, layer.dgrad.request.out_dtype) == ("float32", "bfloat16")
    assert layer.dgrad.request.other_dtype is None
    assert layer.wgrad.request.out_dtype == "bfloat16"
    assert registry.plan_layer(fakes.request(recipe=octavo.HighPrecision())).wgrad.request.other_dtype is None
    mixed = registry.plan_layer(fakes.request(recipe=octavo.HighPrecision(), in_dtype="float16"))
    assert [(plan.request.in_dtype, plan.request.other_dtype) for plan in mixed.plans] == [
        ("float16", None),
        ("bfloat16", "float16"),  # dy, w
        ("float16", "bfloat16"),  # x, dy
    ]
    accumulated = registry.plan_layer(request, wgrad_dtype="float32")
    assert accumulated.wgrad is not None
    assert accumulated.wgrad.request.out_dtype == "float32"
    narrow = registry.plan_layer(fakes.request(recipe=octavo.MXFP8(wgrad_dtype="float16")))
    assert narrow.wgrad is not None
    assert narrow.wgrad.request.out_dtype == "float16"


def test_a_closed_preference_holds_for_every_part(fakes: Any) -> None:
    """A preferred GEMM backend that cannot quantize is not helped out by another in silence."""
    registry = fakes.registry(
        gemm(fakes, "fast", {"fprop", "dgrad", "wgrad"}, {}, priority=9), quantizer(fakes, "makes", {"plain"})
    )
    assert backends(registry.plan_layer(fakes.request()))["quantize_x"] == "makes"
    with prefer("fast"), pytest.raises(NoBackendError, match="name makes or add"):
        registry.plan_layer(fakes.request())
    assert backends(registry.plan_layer(fakes.request(), backend=["fast", "*"]))["quantize_x"] == "makes"


def test_the_missing_operation_is_named(fakes: Any) -> None:
    """The error is that of the operation which nothing serves."""
    registry = fakes.registry(gemm(fakes, "fast", {"fprop", "dgrad"}, {}))
    with pytest.raises(NoBackendError, match="nothing here runs wgrad in mxfp8"):
        registry.plan_layer(fakes.request())
    with pytest.raises(ValueError, match="takes the layer's fprop request with its whole recipe; got op='dgrad'"):
        registry.plan_layer(fakes.request(op="dgrad"))
    with pytest.raises(ValueError, match="got op='quantize', recipe=None"):
        registry.plan_layer(fakes.request(op="quantize", quantizer=octavo.MXFP8().quantizer("x")))
    with pytest.raises(ValueError, match=r"recipe is None; a fprop request names a Recipe, HighPrecision\(\)"):
        fakes.request(recipe=None)


def test_a_layer_logs_one_line(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """contract.md, promise 4: the first use of a recipe says what runs, in one line for the whole layer."""
    registry = fakes.registry(fakes.plugin("a"))
    with caplog.at_level(logging.INFO, "octavo"):
        for k in (32, 64):
            registry.plan_layer(fakes.request(k=k))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"grouped linear in mxfp8 for torch on cpu (recipe {octavo.MXFP8().fingerprint}) runs on: "
        "quantize x a, quantize w a, quantize dy a, fprop a, dgrad a, wgrad a"
    )


def test_only_products_are_emulated(fakes: Any) -> None:
    """A row may serve quantizers and emulated GEMMs alike; the quantizer's bits are the recipe's own."""
    layer = fakes.registry(fakes.plugin("a", rows=[fakes.row(emulated="bf16 products")])).plan_layer(fakes.request())
    assert layer.quantize_x is not None
    assert layer.quantize_x.note == ""
    assert layer.fprop.note == "emulated: bf16 products"


def test_weights_of_mxfp4_are_held_by_whoever_serves_blocks(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No card has a row for the rounding: backends see blocks of bf16, and the front end's function is the plan's."""
    asked: list[Any] = []

    class FrontEnd:
        def rounding_first(self, bound: Any, spec: Any) -> Any:
            asked.append(spec)
            return dataclasses.replace(bound, run="rounds first")

    monkeypatch.setattr(rounding, "framework", {"torch": FrontEnd()}.__getitem__)
    recipe = octavo.MXFP4Weights(wgrad="high_precision")
    plugin = fakes.plugin("a", rows=[fakes.row(recipes={"block", "high_precision"})])
    registry = fakes.registry(plugin)
    layer = registry.plan_layer(fakes.request(recipe=recipe, in_dtype="float16", out_dtype="float16"))
    blocks = octavo.BlockScaling(wgrad="high_precision")
    seen = [request for request in plugin.backend.binds if request.op == "quantize"]
    assert {request.quantizer for request in seen} == {blocks.quantizer(operand) for operand in ("x", "w", "dy")}
    of_w = next(request for request in seen if request.quantizer.role == "w")
    assert (of_w.in_dtype, of_w.out_dtype) == ("bfloat16", "bfloat16")
    assert asked == [recipe.quantizer("w")]
    assert layer.quantize_w.request.quantizer == recipe.quantizer("w")
    assert layer.quantize_w.request.in_dtype == "float16"
    assert layer.quantize_w.run == "rounds first"
    assert [layer.quantize_x.run, layer.quantize_dy.run].count("rounds first") == 0
    printed = str(layer)
    assert printed.startswith(f"grouped linear in mxfp4_weights ({recipe.fingerprint}), computed as block for torch")
    assert "of MXFP4's values, rounded by operations of torch" in printed
    fused = fakes.request(op="act_quantize", quantizer=recipe.quantizer("w"), activation="silu")
    with pytest.raises(
        octavo.NoBackendError, match="rounds nothing to MXFP4, which the quantizer of this act_quantize"
    ):
        fakes.registry(fakes.plugin("b", rows=[fakes.row(ops={"act_quantize"}, recipes={"block"})])).plan(fused)


def test_a_backend_may_round_weights_to_mxfp4_itself(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BoundQuantize.round_first answers, and is asked with the request as it was made, dtype included. None leaves the
    rounding to the front end; an answer of another type is the backend's fault."""
    monkeypatch.setattr(rounding, "framework", {"torch": SimpleNamespace(rounding_first=lambda bound, _: bound)}.get)
    request = fakes.request(
        op="quantize", quantizer=octavo.MXFP4Weights().quantizer("w"), in_dtype="float32", stacked=True
    )
    asked: list[Any] = []

    def registry(answer: Any) -> Any:
        backend = fakes.Backend(BoundQuantize(len, round_first=lambda of: (asked.append(of), answer)[1]))
        return fakes.registry(fakes.plugin("a", backend, rows=[fakes.row(recipes={"block"})]))

    own, front = registry(BoundQuantize(max, note="in one pass")).plan(request), registry(None).plan(request)
    assert (own.run, own.note) == (max, "in one pass")
    assert (front.run, front.note) == (len, "of MXFP4's values, rounded by operations of torch")
    assert asked == [request, request]
    with pytest.raises(NoBackendError, match="round_first returned a str; it returns a BoundQuantize"):
        registry("no answer").plan(request)


def test_a_kernel_that_lies_turned_is_rounded_along_k(fakes: Any) -> None:
    """As [G, K, N] its blocks of 32 run along rows, whichever planes are asked for."""
    for recipe in (octavo.MXFP4Weights(), octavo.MXFP4Weights(dgrad="high_precision", wgrad="high_precision")):
        spec = recipe.quantizer("w")
        assert as_it_lies(spec, "w", "nk") == spec
        turned = as_it_lies(spec, "w", "kn")
        assert turned.mxfp4 == "columnwise"
        assert as_it_lies(turned, "w", "kn") == spec
        assert as_it_lies(octavo.BlockScaling().quantizer("w"), "w", "kn").mxfp4 is None
