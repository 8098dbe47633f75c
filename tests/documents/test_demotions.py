"""The documentation's table of who serves a layer, eagerly and in a CUDA graph: complete, and true of the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from workspace import ROOT

import octavo_native
import octavo_registry
from octavo import NoBackendError
from octavo_registry.contract.request import Request

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import demotion_rows

GRAPH, EAGER, PORTABLE = "torch-cudagraph", "torch-native", "torch-triton"


@cache
def rows() -> tuple[Any, ...]:
    return tuple(demotion_rows.rows())


def of(**fields: str) -> Iterator[Any]:
    found = [row for row in rows() if all(getattr(row, name) == value for name, value in fields.items())]
    assert found
    yield from found


def test_every_case_is_there_once() -> None:
    """Seven recipes, three dtypes, three devices, two places of sizes."""
    keys = {(row.recipe, row.dtype, row.device, row.sizes) for row in rows()}
    assert len(keys) == len(rows()) == 7 * 3 * 3 * 2
    page = demotion_rows.markdown()
    for row in rows():
        assert f"| {row.recipe} |" in page


def test_every_recipe_may_be_captured_on_hopper() -> None:
    """Device sizes and 16-bit inputs: nothing is demoted, eagerly or in a graph."""
    for dtype in ("bfloat16", "float16"):
        for row in of(device="Hopper", sizes="device", dtype=dtype):
            assert (row.eager, row.graph) == (EAGER, GRAPH)
            assert row.eager_reason == row.graph_reason
            assert row.graph_reason.startswith("emulated") == (row.recipe in ("mxfp8", "nvfp4"))


def test_host_sizes_are_never_captured() -> None:
    """Whatever recipe and device: refused, and the sentence names the host and what to give (fault 36)."""
    for device in ("Hopper", "another GPU"):
        for row in of(device=device, sizes="host"):
            assert row.graph == ""
            assert "sizes are on the host (a list); it takes them as a device array" in row.graph_reason
            assert row.eager


def test_a_demotion_has_its_reason() -> None:
    """Whoever is not served by the first choice reads why; on a CPU nothing is captured."""
    for row in rows():
        assert row.eager == EAGER or row.eager_reason
        assert row.graph == GRAPH or row.graph_reason
    for row in of(device="CPU"):
        assert (row.eager, row.graph) == (EAGER, "")
        assert "serves cuda, the device is cpu" in row.graph_reason
    for row in of(device="Hopper", recipe="high_precision", dtype="float32", sizes="device"):
        assert (row.eager, row.graph) == (PORTABLE, PORTABLE)
        assert row.graph_reason == "takes bfloat16, float16, the input is float32"
    for row in of(device="another GPU", sizes="device"):
        assert (row.eager, row.graph) == (PORTABLE, PORTABLE)
        assert row.graph_reason == "needs sm_90, this device is sm_80"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels and devices; planning touches neither."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    word = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr("octavo_torch.compiler.status._words", {torch.device("cuda", 0): word})
    # plans of pretended devices shall not stay
    monkeypatch.setattr(octavo_registry, "_registry", octavo_registry.Registry())


def test_the_table_is_what_the_registry_does(gpus: None) -> None:
    """Every row against a plan that is really bound."""
    recipes = {recipe.kind: recipe for recipe in demotion_rows.RECIPES}
    for row in rows():
        device, arch = demotion_rows.DEVICES[row.device]
        for safe, said in ((False, row.eager), (True, row.graph)):
            request = Request(
                op="fprop", framework="torch", device=device, arch=arch, in_dtype=row.dtype, out_dtype=row.dtype,
                recipe=recipes[row.recipe], sizes=row.sizes, graph_safe=safe,
            )  # fmt: skip
            try:
                plans = octavo_registry.plan_layer(request).plans
            except NoBackendError:
                assert said == "", row
            else:
                assert {plan.backend for plan in plans} == {said}, row
