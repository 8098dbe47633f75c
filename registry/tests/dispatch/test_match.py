"""A card against a request: every condition refuses with both values, and the closest row speaks."""

from __future__ import annotations

import random
from typing import Any

import pytest

import octavo
from octavo_registry import ALL_ACTIVATIONS, QUANTIZERS
from octavo_registry.dispatch.match import match

SPEC = octavo.MXFP8().quantizer("x")

SQUARE_COLUMNS = octavo.BlockScaling(square_columns=True)
BLOCKS = "gives each column a scale in its {} of block, square_columns asks for one for 128 of them"

CASES = [
    ({"framework": "jax"}, {}, "serves jax, the framework is torch"),
    ({"device": "cuda"}, {}, "serves cuda, the device is cpu"),
    ({"ops": {"wgrad", "dgrad"}}, {}, "serves dgrad, wgrad on cpu, the operation is fprop"),
    ({"recipes": {"block", "row"}}, {}, "serves fprop in block, row, the recipe is mxfp8"),
    ({"min_arch": (9, 0), "max_arch": (9, 0)}, {"arch": (8, 0)}, "needs sm_90, this device is sm_80"),
    ({"min_arch": (10, 0)}, {"arch": (9, 0)}, "needs sm_100 or newer, this device is sm_90"),
    ({"max_arch": (9, 0)}, {"arch": (12, 0)}, "needs sm_90 or older, this device is sm_120"),
    ({"min_arch": (9, 0), "max_arch": (10, 0)}, {"arch": (12, 0)}, "needs sm_90 to sm_100, this device is sm_120"),
    ({"min_arch": (9, 0)}, {}, "needs sm_90 or newer, the request names no compute capability"),
    ({}, {"graph_safe": True}, "graph_safe=True was asked for and its fprop in mxfp8 is not graph-safe"),
    ({"sizes": {"device"}}, {"sizes": "host"}, "sizes are on the host (a list); it takes them as a device array"),
    ({"sizes": {"host"}}, {}, "sizes are on the device; it takes them on the host (a list)"),
    ({"in_dtypes": {"bfloat16"}}, {"in_dtype": "float16"}, "takes bfloat16, the input is float16"),
    ({"out_dtypes": {"bfloat16"}}, {"out_dtype": "float32"}, "returns bfloat16, the result is to be float32"),
    (
        {"orientations": {"rowwise"}},
        {"op": "quantize", "quantizer": SPEC},
        "makes rowwise data, columnwise, rowwise was asked for",
    ),
    (
        {},
        {"op": "quantize", "quantizer": SPEC, "layouts": ("plain", "panels")},
        "makes layouts plain, panels, plain was asked for",
    ),
    (
        {"ops": {"dequantize"}},
        {"op": "dequantize", "recipe": None, "quantizer": SPEC, "layouts": ("plain", "panels")},
        "reads layouts plain, the data are in panels, plain",
    ),
    (
        {"ops": {"act_quantize"}},  # a card from before this activation was defined
        {"op": "act_quantize", "quantizer": SPEC, "activation": "clamped_swiglu"},
        "computes geglu, geglu_tanh, gelu, gelu_tanh, relu2, silu, swiglu, the activation is clamped_swiglu",
    ),
    (
        {"ops": {"act_quantize"}},
        {"op": "act_quantize", "quantizer": SPEC, "activation": "silu", "layouts": ("plain", "panels")},
        "makes layouts plain, panels, plain was asked for",
    ),
    (
        {"ops": {"dact_quantize"}, "activations": {"silu", "gelu"}},
        {"op": "dact_quantize", "quantizer": SPEC, "activation": "relu2"},
        "computes gelu, silu, the activation is relu2",
    ),
    (
        {"ops": {"quantize"}, "recipes": {"block"}},  # a card from before this option
        {"op": "quantize", "quantizer": SQUARE_COLUMNS.quantizer("x")},
        BLOCKS.format("quantize"),
    ),
    (
        {"ops": {"wgrad"}, "recipes": {"block"}},
        {"op": "wgrad", "recipe": SQUARE_COLUMNS},
        BLOCKS.format("wgrad"),
    ),
    (
        {"ops": {"norm_quantize"}, "norms": {"rms"}},
        {"op": "norm_quantize", "quantizer": SPEC, "norm": "layer"},
        "computes rms normalization, the norm is layer",
    ),
]


@pytest.mark.parametrize(("row", "request_", "sentence"), CASES)
def test_each_refusal_has_both_values(fakes: Any, row: Any, request_: Any, sentence: str) -> None:
    """contract.md, promise 4; faults.md 57: no refusal without what was needed and what was given."""
    assert match(fakes.card(rows=[fakes.row(**row)]), fakes.request(**request_)) == sentence


@pytest.mark.parametrize(("row", "request_", "sentence"), CASES)
def test_a_row_that_fits_is_found_behind_one_that_does_not(fakes: Any, row: Any, request_: Any, sentence: str) -> None:
    """Any row of the table may admit; the first that does is the plan's capability."""
    wide = fakes.row(
        ops={"fprop", "wgrad", "dequantize", *QUANTIZERS},
        recipes={"block", "mxfp8"},
        square_columns=True,
        graph_safe=True,
        layouts={"plain", "panels"},
        activations=ALL_ACTIVATIONS,
        emulated="everything",
    )
    found = match(fakes.card(rows=[fakes.row(**row), wide]), fakes.request(**request_))
    assert found == wide


def test_the_row_that_came_closest_speaks(fakes: Any) -> None:
    """A card with rows for other devices and recipes refuses for the one thing that is missing."""
    rows = [
        fakes.row(framework="jax"),
        fakes.row(device="cuda", min_arch=(9, 0)),
        fakes.row(device="cuda", min_arch=(10, 0), max_arch=(10, 0)),
        fakes.row(device="cuda", recipes={"block"}),
    ]
    wanted = fakes.request(device="cuda", arch=(8, 0))
    assert match(fakes.card(rows=rows), wanted) == "needs sm_90 or newer or sm_100, this device is sm_80"


def test_rows_that_came_equally_close_speak_together(fakes: Any) -> None:
    """The user sees every recipe that would do, not those of one row."""
    rows = [fakes.row(recipes={"block"}), fakes.row(recipes={"row", "current"})]
    assert "in block, current, row, the recipe is mxfp8" in match(fakes.card(rows=rows), fakes.request())


def test_what_an_operation_has_not_is_not_asked(fakes: Any) -> None:
    """Stacked matrices have no sizes; a quantizer has no output dtype; dequantize has no input dtype and makes no
    planes."""
    base = {"quantizer": SPEC}
    assert not isinstance(
        match(
            fakes.card(rows=[fakes.row(sizes={"device"})]),
            fakes.request(op="quantize", stacked=True, sizes="host", **base),
        ),
        str,
    )
    assert not isinstance(
        match(fakes.card(rows=[fakes.row(out_dtypes={"float32"})]), fakes.request(op="quantize", **base)),
        str,
    )
    dequantizer = fakes.row(ops={"dequantize"}, in_dtypes={"float32"}, orientations={"rowwise"})
    assert not isinstance(match(fakes.card(rows=[dequantizer]), fakes.request(op="dequantize", **base)), str)


def test_admission_is_the_conjunction_of_the_conditions(fakes: Any, rng: random.Random) -> None:
    """Random rows and requests: a row admits exactly where every condition holds, written out once more here."""
    archs = [(8, 0), (9, 0), (10, 0)]
    for _ in range(300):
        low, high = sorted([rng.choice(archs), rng.choice(archs)])
        row = fakes.row(
            ops=set(rng.sample(["fprop", "dgrad", "wgrad"], 2)),
            recipes=set(rng.sample(["mxfp8", "nvfp4", "block"], 2)),
            device=rng.choice(["cpu", "cuda"]),
            min_arch=rng.choice([None, low]),
            max_arch=rng.choice([None, high]),
            graph_safe=rng.random() < 0.5,
        )
        wanted = fakes.request(
            op=rng.choice(["fprop", "dgrad", "wgrad"]),
            recipe=rng.choice([octavo.MXFP8(), octavo.NVFP4(), octavo.BlockScaling()]),
            device=rng.choice(["cpu", "cuda"]),
            arch=rng.choice([None, *archs]),
            graph_safe=rng.random() < 0.5,
        )
        bounded = row.min_arch is not None or row.max_arch is not None
        admitted = (
            wanted.op in row.ops
            and wanted.kind in row.recipes
            and wanted.device == row.device
            and (not bounded or wanted.arch is not None)
            and (row.min_arch is None or wanted.arch is None or wanted.arch >= row.min_arch)
            and (row.max_arch is None or wanted.arch is None or wanted.arch <= row.max_arch)
            and (row.graph_safe or not wanted.graph_safe)
        )
        assert isinstance(match(fakes.card(rows=[row]), wanted), str) != admitted, (row, wanted)
