"""The figure of the packages: what each is, the folders in it, and what it is built on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise

import layout
from svg import Drawing, width_of, wrap
from workspace import packages

GAP, PAD, CHIP = 26, 12, 22
GUTTER, LANE = 36, 9
"""Between columns, and between two arrows in it."""
COLUMNS = ((36, 310), (382, 250), (668, 310), (1014, 232))  # x, width
WIDTH = 1266


@dataclass(frozen=True)
class Place:
    """Where a package stands: first and last column, row from the top, rows that it covers."""

    columns: tuple[int, int]
    row: int
    family: str
    what: str
    rows: int = 1


# Every package of the workspace has its place here; the arrows come from the pyproject files.
PLACES = {
    "octavo": Place(
        (0, 3),
        0,
        "tool",
        "The commands octavo train and octavo new; extras install the other packages. Uses all of them.",
    ),
    "octavo-bench": Place(
        (0, 3), 1, "tool", "The command octavo bench: one folder per benchmark. Uses the front ends and the kernels."
    ),
    "octavo-torch-cudagraph": Place(
        (0, 0), 2, "torch", "Backend: graph-safe plans; captures functions, modules and training steps."
    ),
    "octavo-torch-triton": Place((1, 1), 2, "torch", "Backend: the kernels in Triton on torch tensors."),
    "octavo-jax-triton": Place((2, 2), 2, "jax", "Backend: the kernels in Triton through jax-triton."),
    "octavo-torch-native": Place((0, 0), 3, "torch", "Backend: the native kernels on torch tensors."),
    "octavo-native": Place((1, 1), 3, "native", "C++ and CUDA kernels over addresses and a stream; no framework."),
    "octavo-triton": Place((1, 1), 4, "native", "Kernels in Triton, for any NVIDIA GPU; no framework."),
    "octavo-jax-native": Place((2, 2), 3, "jax", "Backend: the native kernels through XLA's FFI."),
    "octavo-conformance": Place(
        (3, 3), 2, "check", "The suite that every backend must pass, and its pytest plugin.", rows=2
    ),
    "octavo-torch": Place((0, 0), 4, "torch", "Front end: functions, modules, autograd; the reference backend."),
    "octavo-jax": Place(
        (2, 2), 4, "jax", "Front end: functions, gradients, sharding, linen and nnx; the reference backend."
    ),
    "octavo-numerics": Place((3, 3), 4, "check", "The executable definition of every recipe, in numpy; error bounds."),
    "octavo-registry": Place(
        *((0, 2), 5, "base"),
        "The contract of a backend; finds backends, chooses one per operation and says why; the octavo command.",
    ),
    "octavo-core": Place(
        (0, 3), 6, "base", "Recipes, quantizer specs, shapes of quantized tensors, errors: data without a framework."
    ),
}
ON_TOP_OF_ALL = ("octavo", "octavo-bench")
ROWS = 7


def draw() -> str:
    """The SVG file; raises KeyError for a package without a place."""
    drawing = Drawing(WIDTH, "The packages of Octavo, their folders, and what each is built on")
    names = {name: PLACES[name] for name in packages()}
    heights = [0.0] * ROWS
    for name, place in names.items():
        if place.rows == 1:
            heights[place.row] = max(heights[place.row], _content(None, name, 0, 0))
    for name, place in names.items():
        missing = _content(None, name, 0, 0) - sum(heights[place.row : place.row + place.rows]) - GAP * (place.rows - 1)
        if missing > 0:
            heights[place.row + place.rows - 1] += missing
    tops = [16 + sum(heights[:row]) + GAP * row for row in range(ROWS)]
    frames = {}
    for name, place in names.items():
        x, width = _across(place)
        height = sum(heights[place.row : place.row + place.rows]) + GAP * (place.rows - 1)
        frames[name] = (x, tops[place.row], width, height)
        drawing.box(*frames[name], place.family)
        _content(drawing, name, x, tops[place.row])
    ways = _Ways(frames)
    for name in names:
        if name not in ON_TOP_OF_ALL:
            for other in sorted(_direct(name)):
                drawing.arrow(*ways.between(name, other))
    return drawing.text(tops[-1] + heights[-1] + 16)


def _across(place: Place) -> tuple[float, float]:
    first, last = COLUMNS[place.columns[0]], COLUMNS[place.columns[1]]
    return first[0], last[0] + last[1] - first[0]


def _content(drawing: Drawing | None, name: str, x: float, y: float) -> float:
    """Write a package's name, description and folders; returns the height that they take."""
    place = PLACES[name]
    width = _across(place)[1] - 2 * PAD
    at = y + 22
    if drawing is not None:
        drawing.write(x + PAD, at, name, "name")
    for line in wrap(place.what, width, 11.5):
        at += 16
        if drawing is not None:
            drawing.write(x + PAD, at, line)
    at, left = at + 9, x + PAD
    for folder in folders_of(name):
        chip = round(width_of(folder, 11, mono=True) + 10)
        if left + chip > x + PAD + width:
            at, left = at + CHIP, x + PAD
        left += (drawing.chip(left, at, folder) if drawing is not None else chip) + 4
    return at + CHIP + 6 - y


def folders_of(name: str) -> list[str]:
    """The folders of a package, lowest first; its modules, where it has no folders."""
    package = packages()[name]
    if name == "octavo-native":
        folders = {"/".join(file.relative_to(package.directory).parts[:-1]) for file in layout.trees()["native"].files}
        return sorted(folders, key=lambda folder: (_rank("native", folder), folder))
    source = package.source
    folders = [path.name for path in source.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    modules = sorted(path.stem for path in source.glob("*.py") if not path.stem.startswith("_"))
    if len(folders) > 1:
        return sorted(folders, key=lambda folder: (_rank(source.name, folder), folder))
    return [*folders, *modules]


def _rank(tree: str, folder: str) -> int:
    order = layout.LEVELS.get(tree, ())
    return next((number for number, level in enumerate(order) if f"{folder}/".startswith(f"{level}/")), len(order))


def _needs(name: str) -> set[str]:
    project = packages()[name].project
    names = {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in project.get("dependencies", [])}
    return names & set(packages()) - {name}


def _direct(name: str) -> set[str]:
    """What a package needs and reaches through none of the others that it needs."""
    needs = _needs(name)
    return needs - {deeper for other in needs for deeper in _all(other)}


def _all(name: str) -> set[str]:
    needs = _needs(name)
    return needs | {deeper for other in needs for deeper in _all(other)}


Point = tuple[float, float]
Frame = tuple[float, float, float, float]


class _Ways:
    """Corners of the arrows between frames, none of which runs through a frame.

    frames   package -> x, y, width, height
    """

    def __init__(self, frames: Mapping[str, Frame]) -> None:
        self._frames = frames
        self._taken: dict[float, str] = {}  # x of a lane -> where the arrows in it end

    def between(self, name: str, other: str) -> list[Point]:
        """The first of the ways that is free; ValueError where none is."""
        above, below = self._frames[name], self._frames[other]
        rest = [frame for each, frame in self._frames.items() if each not in (name, other)]
        ways = chain(_straight(above, below), self._by_gutters(above, below, other), _around(above, below, rest))
        for way in ways:
            if not any(_crosses(start, end, frame) for start, end in pairwise(way) for frame in rest):
                self._taken.setdefault(way[1][0], other)
                return way
        raise ValueError(f"every way from {name} to {other} runs through a package; give one of them another place")

    def _by_gutters(self, above: Frame, below: Frame, other: str) -> Iterator[list[Point]]:
        """Out of a side, down beside the column and into a side; arrows to one package share a lane."""
        x, y, width, height = above
        to_x, to_y, to_width, to_height = below
        level, arrival = y + height - 20, to_y + to_height / 2
        for start, gutter in ((x, x - GUTTER / 2), (x + width, x + width + GUTTER / 2)):
            lane = next(at for at in count(gutter, LANE) if self._taken.get(at, other) == other)
            end = to_x + to_width + 2 if to_x < lane else to_x - 2
            yield [(start, level), (lane, level), (lane, arrival), (end, arrival)]


def _straight(above: Frame, below: Frame) -> Iterator[list[Point]]:
    """Down, where one is above the other; across, where they stand side by side."""
    x, y, width, height = above
    to_x, to_y, to_width, to_height = below
    left, right = max(x, to_x), min(x + width, to_x + to_width)
    if left < right:
        middle = (left + right) / 2
        yield [(middle, y + height), (middle, to_y - 2)]
    top, bottom = max(y, to_y), min(y + height, to_y + to_height)
    if top < bottom:
        level = (top + bottom) / 2
        yield [(x + width, level), (to_x - 2, level)] if x < to_x else [(x, level), (to_x + to_width + 2, level)]


def _around(above: Frame, below: Frame, rest: Sequence[Frame]) -> Iterator[list[Point]]:
    """Down to the next row, to the left margin, down and into the left side."""
    x, y, width, height = above
    to_x, to_y, _, to_height = below
    middle, level, arrival = x + width / 2, y + height + GAP / 4, to_y + to_height / 2
    margin = min(frame[0] for frame in rest) - GUTTER / 2
    yield [(middle, y + height), (middle, level), (margin, level), (margin, arrival), (to_x - 2, arrival)]


def _crosses(start: Point, end: Point, frame: Frame) -> bool:
    x, y, width, height = frame
    (left, right), (top, bottom) = (sorted(pair) for pair in zip(start, end, strict=True))
    return left < x + width and right > x and top < y + height and bottom > y
