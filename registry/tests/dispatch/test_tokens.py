"""Products that gather rows from a MoE layer's tokens."""

from __future__ import annotations

from typing import Any

import pytest

import octavo
from octavo_registry.contract.gemm import BoundFprop


@pytest.mark.parametrize(
    ("recipe", "values", "codes"),
    [
        (octavo.MXFP8(), False, True),
        (octavo.RowScaling(), False, True),
        (octavo.CurrentScaling(), False, False),  # a scale of the whole group
        (octavo.NVFP4(), False, False),  # an amax of the whole group
        (octavo.HighPrecision(), True, False),
    ],
    ids=lambda value: value.kind if isinstance(value, octavo.Recipe) else "",
)
@pytest.mark.parametrize("gathers", [True, False])
def test_codes_of_tokens_are_gathered_where_each_row_has_its_own(
    fakes: Any, recipe: octavo.Recipe, values: bool, codes: bool, gathers: bool
) -> None:
    """A token quantized once has the codes of its rows only where these depend on no other row."""
    reads = fakes.Backend(BoundFprop(print, takes_tokens=("x",) if gathers else ()))
    parts = {"a": ({"fprop"}, reads), "b": ({"dgrad", "wgrad", "quantize"}, fakes.Backend())}
    plugins = [
        fakes.plugin(name, backend, rows=[fakes.row(ops=ops, recipes={recipe.kind})])
        for name, (ops, backend) in parts.items()
    ]
    layer = fakes.registry(*plugins).plan_layer(fakes.request(recipe=recipe))
    assert layer.reads_tokens("fprop", "x") is (values and gathers)
    assert layer.reads_codes_of_tokens("fprop", "x") is (codes and gathers)
    assert not layer.reads_codes_of_tokens("fprop", "w")
