"""The two figures as PNG, for slides and papers: loss with the gap to bf16, and the load of every expert."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from octavo_cli.train.config import BASELINE
from octavo_cli.train.report.results import Results, gap_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one rendering. `series` is for the recipes other than the baseline, in order.

    The series are from the palettes of Okabe and Ito (2008) and Tol (2021), darkened or lightened until each has a
    contrast of at least 3 to 1 with the background; markers tell the series apart without colour.
    """

    background: str
    text: str
    muted: str
    grid: str
    baseline: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff",
    "#1b1f24",
    "#59636e",
    "#e3e6ea",
    "#3d444d",
    ("#0072b2", "#c2500a", "#008060", "#a3459b", "#8a6d00", "#2f8ac4"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def loss_figure(results: Results, theme: Theme = LIGHT) -> bytes:
    """PNG: held-out and training loss against steps; next to it the held-out gap to the baseline with its spread."""
    with _canvas(theme, (11.5, 4.6)) as (figure, axes):
        left, right = axes(2, width_ratios=(1.15, 1.0), wspace=0.62)
        _loss_panel(left, results, theme)
        _gap_panel(right, results, theme)
        return _png(figure)


def load_figure(results: Results, theme: Theme = LIGHT) -> bytes:
    """PNG: share of routed rows that each expert got in the last quarter of the steps, one panel a layer."""
    layers = min(4, results.config.layers)
    experts = results.config.experts
    height = min(12.0, 1.9 + 0.36 * experts)
    with _canvas(theme, (11.0 if layers > 1 else 8.0, height)) as (figure, axes):
        panels = axes(layers, sharey=True, wspace=0.15)
        for layer, panel in enumerate(panels):
            _load_panel(panel, results, theme, layer)
        panels[0].set_ylabel("expert", color=theme.muted)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="upper center",
            ncols=min(4, len(labels)),
            frameon=False,
            bbox_to_anchor=(0.5, -0.015),
            handletextpad=0.2,
            columnspacing=1.8,
        )
        return _png(figure)


def _style(results: Results, theme: Theme) -> dict[str, tuple[str, str]]:
    """(colour, marker) by recipe."""
    others = [name for name in results.recipes if name != BASELINE]
    styles = {BASELINE: (theme.baseline, _MARKERS[0])}
    for index, name in enumerate(others):
        styles[name] = (theme.series[index % len(theme.series)], _MARKERS[1 + index % (len(_MARKERS) - 1)])
    return styles


def _loss_panel(panel: Axes, results: Results, theme: Theme) -> None:
    ends: list[tuple[str, float, str]] = []
    for name, (colour, marker) in _style(results, theme).items():
        runs = results.of(name)
        losses = np.mean([run.losses for run in runs], axis=0)
        panel.plot(np.arange(1, len(losses) + 1), losses, color=colour, linewidth=0.8, alpha=0.45)
        steps = [item.step for item in runs[0].evaluations]
        held_out = np.mean([[item.loss for item in run.evaluations] for run in runs], axis=0)
        panel.plot(steps, held_out, color=colour, marker=marker, markersize=5, linewidth=1.8)
        ends.append((f"{name}  {held_out[-1]:.3f}", float(held_out[-1]), colour))
    panel.axhline(results.unigram_loss, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate(
        "byte frequencies alone",
        (1, results.unigram_loss),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=theme.muted,
        fontsize=9,
    )
    panel.set_xlim(0, results.config.steps)
    panel.set_xlabel("optimizer steps")
    panel.set_ylabel("cross entropy, nats per byte")
    _title(panel, "Loss", "thick with markers: held out; thin: training batch")
    _label_ends(panel, ends)


def _gap_panel(panel: Axes, results: Results, theme: Theme) -> None:
    styles = _style(results, theme)
    ends: list[tuple[str, float, str]] = []
    others = [name for name in results.recipes if name != BASELINE]
    steps = np.array([item.step for item in results.runs[0].evaluations], float)
    spacing = results.config.steps * 0.012
    for index, name in enumerate(others):
        colour, marker = styles[name]
        gaps = [gap_at(results.runs, name, position) for position in range(len(steps))]
        centre = steps + (index - (len(others) - 1) / 2) * spacing
        values = [gap.percent for gap in gaps]
        spreads = [gap.spread for gap in gaps]
        panel.errorbar(
            centre,
            values,
            yerr=spreads,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.6,
            elinewidth=1.1,
            capsize=3,
        )
        ends.append((f"{name}  {values[-1]:+.2f} %", values[-1], colour))
    panel.axhline(0, color=theme.baseline, linewidth=1.4)
    panel.set_xlim(0, results.config.steps * 1.03)
    panel.set_xlabel("optimizer steps")
    panel.set_ylabel("held-out loss above bf16, %")
    over = next(iter(results.gaps.values())).spread_over if others else "nothing to compare"
    kind = "one standard deviation" if "seeds" in over else "one standard error"
    _title(panel, "Gap to bf16", f"bars: {kind} over {over}" if others else "no other recipe was run")
    _label_ends(panel, ends)


def _load_panel(panel: Axes, results: Results, theme: Theme, layer: int) -> None:
    experts = results.config.experts
    even = 100 / experts
    top = even
    for name, (colour, marker) in _style(results, theme).items():
        load = 100 * np.mean([run.load[layer] for run in results.of(name)], axis=0)
        top = max(top, float(load.max()))
        panel.plot(
            load,
            np.arange(experts),
            marker,
            color=colour,
            markersize=7,
            label=name,
            markeredgewidth=1.4,
            markerfacecolor="none" if name != BASELINE else colour,
            clip_on=False,
        )
    panel.axvline(even, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate(
        f"even: {even:.3g} %",
        (even, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 4),
        textcoords="offset points",
        color=theme.muted,
        fontsize=9,
    )
    panel.set_xlim(0, top * 1.15)
    panel.set_ylim(experts - 0.4, -0.6)
    if experts <= 32:
        panel.set_yticks(range(experts))
    panel.set_xlabel("share of routed rows, %")
    where = f"layer {layer + 1}, " if results.config.layers > 1 else ""
    _title(panel, "Expert load", f"{where}mean of the last quarter of the steps")


def _title(panel: Axes, title: str, subtitle: str) -> None:
    panel.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    panel.annotate(
        subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9, alpha=0.8
    )


def _label_ends(panel: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Labels right of the axes at the curves' last values, pushed apart so that none covers another."""
    low, high = panel.get_ylim()
    gap = (high - low) * 0.062
    ordered = sorted(ends, key=lambda item: item[1])
    heights = [value for _, value, _ in ordered]
    for _ in range(200):
        for index in range(1, len(heights)):
            short = gap - (heights[index] - heights[index - 1])
            if short > 0:
                heights[index] += short / 2
                heights[index - 1] -= short / 2
    shift = max(0.0, low + gap / 2 - heights[0]) if heights else 0.0
    for (label, _, colour), height in zip(ordered, heights, strict=True):
        panel.annotate(
            label,
            (1.0, height + shift),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
            annotation_clip=False,
        )


@contextmanager
def _canvas(theme: Theme, size: tuple[float, float]) -> Iterator[tuple[Figure, Callable[..., list[Axes]]]]:
    """A figure and a maker of its axes; drawn by Agg alone, so no display and no global pyplot state is touched."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": theme.text,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.text,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
    }
    with mpl.rc_context(cast(Any, settings)):
        figure = Figure(figsize=size, dpi=150)
        FigureCanvasAgg(figure)

        def axes(columns: int, *, sharey: bool = False, **spacing: Any) -> list[Axes]:
            return list(figure.subplots(1, columns, squeeze=False, sharey=sharey, gridspec_kw=spacing).flat)

        yield figure, axes


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight", pad_inches=0.2, metadata={"Software": "octavo train"})
    return stream.getvalue()
