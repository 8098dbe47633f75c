"""`octavo train --quick` from end to end, in both frameworks, and the files it leaves."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

NAMES = {"torch": ["bf16", "fp8-block", "mxfp8", "nvfp4"], "jax": ["bf16", "mxfp8"]}
"""Recipes by framework: XLA compiles for many seconds a recipe, and test_models trains others in JAX."""

Demo = tuple[str, Path, dict[str, Any]]


@pytest.fixture(scope="module", params=["torch", "jax"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Demo:
    """(framework, output folder, what --json printed) of one quick run a framework."""
    out = tmp_path_factory.mktemp("demo") / "demo-output"
    recipes = ",".join(NAMES[request.param])
    result = run("train", "--quick", "--json", "--framework", request.param, "--recipes", recipes, "--out", str(out))
    assert result.code == 0, result.err
    return request.param, out, result.json


def test_every_file_is_there_and_nothing_else(demo: Demo) -> None:
    """Temporary folders are gone."""
    _, out, _ = demo
    assert sorted(path.name for path in out.iterdir()) == ["curves.json", "expert_load.png", "index.html", "loss.png"]
    assert [path.name for path in out.parent.iterdir()] == ["demo-output"]


def test_json_is_the_file_and_has_every_curve(demo: Demo) -> None:
    """One run a recipe, a loss a step, held-out losses, loads that sum to one, a gap beside its spread."""
    framework, out, printed = demo
    assert json.loads((out / "curves.json").read_text()) == printed
    assert printed["framework"] == framework
    assert [run["recipe"] for run in printed["runs"]] == NAMES[framework]
    config = printed["config"]
    for run in printed["runs"]:
        assert len(run["train_loss"]) == config["steps"]
        assert [item["step"] for item in run["held_out"]] == [6, 12]
        assert run["train_loss"][-1] < run["train_loss"][0]
        for load in run["expert_load"]:
            assert len(load) == config["experts"]
            assert sum(load) == pytest.approx(1, abs=1e-5)
    assert [gap["recipe"] for gap in printed["gaps"]] == NAMES[framework][1:]
    assert all(gap["spread_percent"] > 0 and "held-out sequences" in gap["spread_over"] for gap in printed["gaps"])


def test_recipes_start_from_the_same_parameters_and_data(demo: Demo) -> None:
    """First losses differ by rounding alone, and last ones do differ: the recipe is really used."""
    framework, _, printed = demo
    first = [run["train_loss"][0] for run in printed["runs"]]
    assert max(first) - min(first) < 0.05
    assert len({run["train_loss"][-1] for run in printed["runs"]}) == len(NAMES[framework])


def test_both_frameworks_quantize_the_trained_weights_to_the_same_bytes(demo: Demo) -> None:
    """Payload and scales, byte for byte, against the definition (contract.md, promise 5)."""
    framework, _, printed = demo
    bits = printed["bits"]
    assert bits["frameworks"] == ["torch", "jax"]
    assert bits["agree"] is True
    assert bits["recipes"]["bf16"]["agree"] is None
    for name in NAMES[framework][1:]:
        assert bits["recipes"][name]["agree"] is True
        assert bits["recipes"][name]["compared_bytes"] > 100_000


def test_gradients_and_quantizers_are_observed(demo: Demo) -> None:
    """A norm a step; in torch the operands of both layers, at the first step, the last and between, with their SQNR."""
    framework, _, printed = demo
    assert printed["backends"]
    for run in printed["runs"]:
        assert len(run["gradient_norm"]) == printed["config"]["steps"]
        assert all(norm > 0 for norm in run["gradient_norm"])
        if framework == "jax" or run["recipe"] == "bf16":
            assert run["health"] == []
            continue
        assert [seen["step"] for seen in run["health"]] == [1, 3, 5, 8, 10, 12]
        for seen in run["health"]:
            assert list(seen["layers"]) == ["layer0.fc1", "layer0.fc2"]
            for operands in seen["layers"].values():
                assert list(operands) == ["x", "w", "dy"]
                for numbers in operands.values():
                    assert sorted(numbers) == ["amax", "non_finite", "saturated", "sqnr_db", "underflow"]
    assert set(printed["weights"]) == set(NAMES[framework][1:])
    low = {"nvfp4": 15}
    for name, weights in printed["weights"].items():
        assert all(numbers["sqnr_db"] > low.get(name, 25) for numbers in weights.values())


class _Page(HTMLParser):
    """Collects what a browser would fetch, and images without an alternative text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.mute: int = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.fetched += [values[name] or "" for name in ("src", "href", "srcset", "data", "poster") if name in values]
        if tag == "img" and not values.get("alt"):
            self.mute += 1


def test_the_page_is_self_contained(demo: Demo) -> None:
    """Nothing is fetched, a drawing of each chart is there without a script, and names and units are explained."""
    framework, out, _ = demo
    text = (out / "index.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert not page.fetched
    assert page.mute == 0
    assert not {"link", "iframe", "object", "img"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://", text)
    assert page.tags.count("figure") == (16 if framework == "torch" else 4)
    assert page.tags.count("h1") == 1
    for part in ("The expert layers ran on", "accuracy", "SQNR", "nat", "Gradient norm", "documentation"):
        assert part in text
    assert '<html lang="en">' in text
    for name in NAMES[framework]:
        assert f'<th scope="row">{name}</th>' in text


@pytest.mark.parametrize("name", ["loss.png", "expert_load.png"])
def test_figures_are_png_of_a_readable_size(demo: Demo, name: str) -> None:
    """At least 1000 pixels wide."""
    _, out, _ = demo
    content = (out / name).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 500
