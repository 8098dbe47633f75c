"""The page of a run: losses, what quantization did while it trained, and how to run it again."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from octavo_cli.page.charts import Chart, Series, grid_of
from octavo_cli.page.document import document, facts, section, table
from octavo_cli.train.config import BASELINE
from octavo_cli.train.report.results import SEED_SPREAD, Gap, Results, Run, gap_at

RECIPES = {
    "bf16": "no quantization: bfloat16 products, the baseline",
    "fp8-current": "FP8 (E4M3, gradients E5M2), one scale for each expert's tensor, from its own largest value",
    "fp8-delayed": "FP8 (E4M3, gradients E5M2), one scale for each expert's tensor, from earlier steps",
    "fp8-row": "FP8 (E4M3), one scale for each row",
    "fp8-block": "FP8 (E4M3), one scale for 1x128 values of a row, or 128x128 of a weight",
    "mxfp8": "FP8 (E4M3), one power of two as the scale of 32 values (OCP Microscaling)",
    "mxfp4": "weights with the values of FP4 (E2M1), one power of two as the scale of 32, the rest as fp8-block",
    "nvfp4": "FP4 (E2M1), one E4M3 scale for 16 values and one fp32 scale for each expert",
}  # fmt: skip
"""What the names of presets mean."""

_METRICS = (
    ("sqnr_db", "SQNR", "dB", "Signal over quantization noise: 6 dB more halve the error.", False),
    ("amax", "Largest magnitude", "amax", "The value that scales are made from; a jump comes before trouble.", True),
    ("underflow", "Underflow", "% of values", "Values that are not zero and become zero.", False),
    ("saturated", "Saturation", "% of values", "Values cut to the format's largest; 0 unless scales lag.", False),
)  # fmt: skip
"""Field, title, unit, what it means, and whether it is drawn by its logarithm."""

_OPERANDS = {"x": "activations (x)", "w": "weights (w)", "dy": "gradients (dy)"}


def render_page(results: Results, command: str) -> str:
    """The page; it needs nothing but itself."""
    parts = [
        section("losses", "Held-out loss", _loss_table(results)),
        section("curves", "Training", grid_of([_loss_chart(results), _gap_chart(results), _norm_chart(results)])),
        section("health", "What quantization did", _health(results)),
        section("bits", "Quantized bits", _bits(results)),
        section("load", "Expert load", _load(results)),
        section("terms", "Recipes and units", _terms(results)),
        section("run", "This run", f"<pre><code>{escape(command)}</code></pre>{_facts(results)}"),
    ]
    return document("Training experts in low precision", _lead(results), "\n".join(parts))


def _lead(results: Results) -> str:
    config = results.config
    seeds = f"{config.seeds} seeds" if config.seeds > 1 else f"seed {config.seed}"
    unfinished = ", ".join(results.missing) or "the last seed"
    stopped = f" The run was stopped before {unfinished} had finished." if results.stopped else ""
    return (
        f"A small Mixture-of-Experts language model ({config.experts} experts, {config.top_k} per token, width "
        f"{config.width}) learned {results.text['source']} for {config.steps} steps, once for each recipe, in "
        f"{results.framework} on {results.device} ({seeds}). Every run saw the same bytes and began from the same "
        f"parameters; only the number format of the expert layers differs.{stopped}"
    )


def _loss_table(results: Results) -> str:
    gaps = results.gaps
    rows = [_loss_row(results, name, gaps.get(name)) for name in results.recipes]
    over = next(iter(gaps.values())).spread_over if gaps else ""
    if not gaps:
        note = ""
    elif "seeds" in over:
        note = f"<p>The spread is one standard deviation of the gap over {over}.</p>"
    else:
        note = (
            f"<p>The spread is one standard error of the gap over {over}. It says how well this text measures the gap "
            f"of this seed. Other seeds moved the gap by {SEED_SPREAD[0]} to {SEED_SPREAD[1]} % (one standard "
            "deviation over 3 paired seeds of 200 steps); <code>--seeds 3</code> measures that here.</p>"
        )
    caption = (
        "Cross entropy on text that no step saw, in nats per byte; lower is better. Knowing byte frequencies alone "
        f"gives {results.unigram_loss:.3f}. SQNR is that of the trained expert weights, the worst of them."
    )
    header = ("recipe", "held-out loss", "gap to bf16", "spread", "SQNR of weights")
    return table(caption, header, rows, numbers=(1, 2, 3, 4)) + note + _speed_note(results)


def _loss_row(results: Results, name: str, gap: Gap | None) -> list[str]:
    weights = results.weights.get(name, {}).values()
    return [
        escape(name),
        f"{results.held_out(name):.4f}",
        f"{gap.percent:+.2f} %" if gap else "baseline",
        f"± {gap.spread:.2f} %" if gap else "",
        f"{min(numbers['sqnr_db'] for numbers in weights):.1f} dB" if weights else "",
    ]


def _speed_note(results: Results) -> str:
    names = ", ".join(f"<code>{escape(name)}</code>" for name in results.backends) or "the framework itself"
    if results.device != "cpu":
        return f"<p>The expert layers ran on {names}.</p>"
    return (
        f"<p>The expert layers ran on {names}, on a CPU. This run measures accuracy: on a CPU low precision costs time "
        "and saves none, so no seconds are shown. <code>octavo bench</code> measures speed on a GPU.</p>"
    )


def _colours(results: Results) -> dict[str, int]:
    others = [name for name in results.recipes if name != BASELINE]
    return {BASELINE: 0} | {name: 1 + number % 6 for number, name in enumerate(others)}


def _loss_chart(results: Results) -> Chart:
    series = []
    for name, colour in _colours(results).items():
        runs = results.of(name)
        losses = np.mean([run.losses for run in runs], axis=0)
        held_out = np.mean([[item.loss for item in run.evaluations] for run in runs], axis=0)
        steps = [item.step for item in runs[0].evaluations]
        points = list(zip(steps, map(float, held_out), strict=True))
        training = list(enumerate(map(float, losses), 1))
        series += [
            Series(f"{name}, batch", training, colour, faint=True),
            Series(f"{name}, held out", points, colour, dash=colour),
        ]
    ends = ", ".join(f"{name} {results.held_out(name):.3f}" for name in results.recipes)
    summary = f"Training and held-out loss fall for every recipe; final held-out loss: {ends} nats per byte."
    lines = [("byte frequencies alone", results.unigram_loss)]
    return Chart("Loss", summary, "step", "nats per byte", series, "Thin: the batch of a step.", lines=lines)


def _gap_chart(results: Results) -> Chart:
    series = []
    for name, colour in _colours(results).items():
        if name == BASELINE:
            continue
        evaluations = results.of(name)[0].evaluations
        points = [(item.step, gap_at(results.runs, name, at).percent) for at, item in enumerate(evaluations)]
        series.append(Series(name, points, colour, dash=colour))
    ends = ", ".join(f"{name} {gap.percent:+.2f} %" for name, gap in results.gaps.items())
    summary = f"Held-out loss above bf16 at the end: {ends}." if ends else "No other recipe was run."
    note = "Its spread is in the table above."
    return Chart("Gap to bf16", summary, "step", "% above bf16", series, note, lines=[("bf16", 0.0)])


def _norm_chart(results: Results) -> Chart:
    series = []
    for name, colour in _colours(results).items():
        norms = np.mean([run.gradient_norms for run in results.of(name)], axis=0)
        series.append(Series(name, list(enumerate(map(float, norms), 1)), colour, dash=colour))
    summary = "Euclidean norm of all gradients at each step, by recipe."
    return Chart("Gradient norm", summary, "step", "norm", series, "All parameters together.", log=True)


def _health(results: Results) -> str:
    observed = {name: results.of(name)[0] for name in results.recipes if results.of(name)[0].health}
    if not observed:
        why = "no recipe quantizes" if len(results.recipes) == 1 else f"{results.framework} runs are not observed"
        return (
            f"<p>There are no numbers over training: {why}. The table above has the SQNR of the trained weights; "
            "<code>octavo_torch.observe</code> and <code>octavo_jax.observed</code> count in a model of yours.</p>"
        )
    steps = len(next(iter(observed.values())).health)
    parts = [
        f"<p>What the quantizers did to the operands of the expert layers in {steps} steps of the first seed: up to "
        "128 rows of each expert. <code>octavo_torch.observe(model)</code> counts the same in a model of yours.</p>"
    ]
    for number, (field, title, unit, meaning, log) in enumerate(_METRICS):
        charts = [
            _health_chart(results, observed, operand, (field, f"{title}, {what}", unit), log)
            for operand, what in _OPERANDS.items()
        ]
        shown = " open" if number < 2 else ""
        parts.append(f"<details{shown}><summary>{title}</summary><p>{meaning}</p>{grid_of(charts)}</details>")
    return "".join(parts)


def _health_chart(
    results: Results, observed: dict[str, Run], operand: str, what: tuple[str, str, str], log: bool
) -> Chart:
    field, title, unit = what
    colours = _colours(results)
    series = [
        Series(f"{name}, {layer}", points, colours[name], dash=dash)
        for name, run in observed.items()
        for dash, (layer, points) in enumerate(_lines(run, operand, field))
    ]
    ends = ", ".join(f"{one.name} {one.present()[-1][1]:.3g}" for one in series if one.present())
    return Chart(
        title, f"{title} in {unit} at the last observed step: {ends or 'none'}.", "step", unit, series, log=log
    )


def _lines(run: Run, operand: str, field: str) -> Iterator[tuple[str, list[tuple[float, float | None]]]]:
    scale = 100.0 if field in ("saturated", "underflow") else 1.0
    for layer in run.health[0].health:
        points: list[tuple[float, float | None]] = []
        for seen in run.health:
            value = seen.health[layer].get(operand, {}).get(field)
            points.append((seen.step, None if value is None else scale * value))
        yield layer.removeprefix("layer0.") if len(run.load) == 1 else layer, points


def _bits(results: Results) -> str:
    bits = results.bits
    others = " and ".join(bits.frameworks)
    rows = []
    for item in bits.recipes:
        verdict = "not compared" if item.skipped else "equal" if item.agree else "different"
        kind = "" if item.skipped else "good" if item.agree else "bad"
        rows.append([escape(item.recipe), f'<span class="{kind}">{verdict}</span>', escape(item.sentence)])
    alone = "" if len(bits.frameworks) > 1 else " The other framework is not installed here."
    return (
        f"<p>The trained expert weights of each recipe, quantized by {escape(others)} and by the definition in "
        f"<code>octavo_numerics</code>: payload and scales, byte for byte.{alone}</p>"
        f"{table('', ('recipe', 'bytes', 'detail'), rows)}"
    )


def _load(results: Results) -> str:
    loads = [run.load for run in results.of(BASELINE)]
    low, high = 100 * min(load.min() for load in loads), 100 * max(load.max() for load in loads)
    summary = f"Share of routed rows of each expert; with bf16 between {low:.1f} and {high:.1f} per cent."
    even = [("an even share", 100 / results.config.experts)]
    charts = []
    for layer in range(min(4, results.config.layers)):
        series = []
        for name, colour in _colours(results).items():
            load = 100 * np.mean([run.load[layer] for run in results.of(name)], axis=0)
            series.append(Series(name, list(enumerate(map(float, load))), colour, dots=True))
        title = f"Layer {layer + 1}" if results.config.layers > 1 else "Last quarter of the steps"
        charts.append(Chart(title, summary, "expert", "% of routed rows", series, lines=even))
    return f"<p>A load-balancing loss keeps the experts busy.</p>{grid_of(charts)}"


def _terms(results: Results) -> str:
    names = {
        name: RECIPES.get(name, f"your recipe, of kind {fields['kind']}") for name, fields in results.recipes.items()
    }
    units = {
        "nat": "unit of cross entropy with natural logarithms; divide by 0.693 for bits",
        "gap": "held-out loss above that of bf16, in per cent of bf16's",
        "SQNR": "signal over quantization noise, in decibels: 20 dB is an error of 10 %, 30 dB of 3 %, 40 dB of 1 %",
        "fc1, fc2": "the two grouped layers of the experts, before and behind the activation",
    }
    return facts(names) + "<br>" + facts(units)


def _facts(results: Results) -> str:
    text, config = results.text, results.config
    backends = "; ".join(f"{name} ({', '.join(operations)})" for name, operations in results.backends.items())
    named = {
        "text": f"{text['source']}, {text['bytes']:,} bytes, sha256 {text['sha256'][:16]}",
        "model": f"{config.layers} {'layer' if config.layers == 1 else 'layers'}, width {config.width}, hidden "
        f"{config.hidden}, {config.experts} experts, top {config.top_k}",
        "batch": f"{config.batch} sequences of {config.context} bytes",
        "backends": backends or "none was asked",
        "versions": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        "time": f"{results.seconds:.0f} s for everything, with the comparison of bits",
        "recipes": ", ".join(f"{name} ({content['fingerprint']})" for name, content in results.recipes.items()),
    }
    return (
        "<p>The numbers behind this page are in <code>curves.json</code> in the same folder; <code>octavo "
        f"compare</code> compares two of them.</p>{facts(named)}"
    )
