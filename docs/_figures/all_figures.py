"""Every figure of the docs by the name of its file."""

from __future__ import annotations

from collections.abc import Iterator

import call
import experts
import groups
import house
import many_ranks
import mesh
import planes
import products
import roofline
import scales
import speed
import training_runs

FIGURES = (
    {
        module.__name__: module.draw
        for module in (house, call, groups, planes, products, scales, mesh, experts, many_ranks, roofline)
    }
    | speed.CHARTS
    | training_runs.CHARTS
)


def drawn() -> Iterator[tuple[str, str]]:
    """Name and SVG text of each."""
    for name, draw in FIGURES.items():
        yield name, draw()
