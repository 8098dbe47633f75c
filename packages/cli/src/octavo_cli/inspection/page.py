"""The interactive page of `octavo inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from octavo import Recipe
from octavo_cli.inspection.study import Study, worst
from octavo_cli.page.charts import Chart, Series, grid_of
from octavo_cli.page.document import document, facts, section, table

MOST_TENSORS = 60
"""Tensors with charts of their own; the tables have all."""


def render_page(title: str, studies: Sequence[Study], recipes: Mapping[str, Recipe], named: Mapping[str, str]) -> str:
    """The page; `named` are the recipes that the checkpoints say they were trained in."""
    tried = [item for item in studies if item.verdicts]
    parts = [
        section("recipes", "What each recipe would do", _overview(tried, recipes)),
        section("tensors", "Tensors", _tensors(studies)),
    ]
    if named:
        parts.append(section("trained", "Recipes in the checkpoint", facts(dict(named))))
    if tried:
        parts.append(section("scales", "Scales and experts", _details(tried, recipes)))
    lead = (
        f"{len(studies)} tensors; {len(tried)} of them are matrices that a recipe quantizes. SQNR is signal over "
        "quantization noise: 20 dB is an error of 10 %, 30 dB of 3 %."
    )
    return document(f"Inspection of {title}", lead, "\n".join(parts))


def _overview(tried: Sequence[Study], recipes: Mapping[str, Recipe]) -> str:
    if not tried:
        return "<p>No tensor is a matrix of bf16, fp16 or fp32 values.</p>"
    series = []
    for number, name in enumerate(recipes):
        points = [(at, item.verdicts[name].worst_sqnr) for at, item in enumerate(tried)]
        series.append(Series(name, points, 1 + number % 6, dots=True))
    summary = "; ".join(f"{name} at worst {worst(tried, name):.1f} dB" for name in recipes)
    chart = Chart("SQNR of each tensor", summary, "tensor, in the table's order", "dB, worst expert", series)
    rows = []
    for name, recipe in recipes.items():
        totals = [item.verdicts[name].total for item in tried]
        rows.append([
            escape(name),
            f"{worst(tried, name):.1f} dB",
            f"{100 * max(one.get('underflow', 0.0) for one in totals):.3g} %",
            f"{100 * max(one.get('saturated', 0.0) for one in totals):.3g} %",
            f"<code>{recipe.fingerprint}</code>",
        ])  # fmt: skip
    header = ("recipe", "worst SQNR", "most underflow", "most saturation", "fingerprint")
    return table("Over all tensors; SQNR is that of the worst expert.", header, rows, (1, 2, 3)) + grid_of([chart])


def _tensors(studies: Sequence[Study]) -> str:
    rows = []
    for item in studies:
        trouble = ""
        if item.non_finite:
            trouble = f'<span class="bad">{item.non_finite:,}, first at {list(item.first_non_finite or ())}</span>'
        rows.append([
            f"<code>{escape(item.name)}</code>",
            escape("x".join(map(str, item.shape)) or "scalar"),
            escape(item.dtype),
            f"{max(item.amax):.4g}" if item.amax else "",
            trouble or "none",
            escape(item.skipped) or "tried",
        ])  # fmt: skip
    return table("", ("tensor", "shape", "dtype", "amax", "not finite", "recipes"), rows, (3,))


def _details(tried: Sequence[Study], recipes: Mapping[str, Recipe]) -> str:
    parts = []
    if len(tried) > MOST_TENSORS:
        parts.append(f"<p>The first {MOST_TENSORS} of {len(tried)} tensors; <code>--match</code> chooses others.</p>")
    for number, item in enumerate(tried[:MOST_TENSORS]):
        charts = [_experts(item), _sqnr(item, recipes), _exponents(item, recipes)]
        shown = " open" if number == 0 else ""
        parts.append(f"<details{shown}><summary><code>{escape(item.name)}</code></summary>{grid_of(charts)}</details>")
    return "".join(parts)


def _experts(item: Study) -> Chart:
    points = list(enumerate(item.amax))
    summary = f"Largest magnitudes of {len(item.amax)} experts, from {min(item.amax):.3g} to {max(item.amax):.3g}."
    return Chart("Largest magnitude", summary, "expert", "amax", [Series("amax", points, 1, dots=True)], log=True)


def _sqnr(item: Study, recipes: Mapping[str, Recipe]) -> Chart:
    series = []
    for number, name in enumerate(recipes):
        points = [(at, numbers.get("sqnr_db")) for at, numbers in enumerate(item.verdicts[name].experts)]
        series.append(Series(name, points, 1 + number % 6, dots=True))
    summary = "; ".join(f"{name} {item.verdicts[name].total.get('sqnr_db', float('nan')):.1f} dB" for name in recipes)
    return Chart("SQNR", summary, "expert", "dB", series)


def _exponents(item: Study, recipes: Mapping[str, Recipe]) -> Chart:
    series = []
    for number, name in enumerate(recipes):
        counts = item.verdicts[name].exponents
        whole = sum(counts.values()) or 1
        points = [(exponent, 100 * count / whole) for exponent, count in counts.items()]
        series.append(Series(name, points, 1 + number % 6, dash=number))
    spans = [
        f"{name} from 2^{min(counts)} to 2^{max(counts)}"
        for name in recipes
        if (counts := item.verdicts[name].exponents)
    ]
    title = "Scales by their binary exponent"
    return Chart(title, "; ".join(spans) or "no scales", "exponent of the scale", "% of scales", series)
