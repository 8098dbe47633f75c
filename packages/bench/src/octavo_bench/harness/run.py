"""A run in progress: it records rows that fail and goes on with the others, and estimates the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from octavo import NoBackendError
from octavo_bench.errors import AbsentError
from octavo_bench.harness.options import Options, SizesOption
from octavo_bench.harness.results import Failure, in_one_line
from octavo_bench.harness.shapes import Shape, sizes_of

Asked = TypeVar("Asked", bound=Options)
Sized = TypeVar("Sized", bound=SizesOption)
R = TypeVar("R")


@dataclass(slots=True)
class Pace:
    """How much of a run is done, and from that how long the rest will take.

    rows, flops   of the whole run, about
    """

    rows: int = 0
    flops: float = 0.0
    done: int = 0
    done_flops: float = 0.0
    start: float = field(default_factory=time.perf_counter)
    said: float | None = None

    def after(self, flops: float) -> str:
        """Count a row, and return a line about the time that is left, or "" where it is too early for another one."""
        self.done, self.done_flops = self.done + 1, self.done_flops + flops
        now = time.perf_counter()
        quiet = now - self.start < _FIRST_WORD if self.said is None else now - self.said < _NEXT_WORD
        if quiet or self.done >= self.rows:
            return ""
        self.said = now
        rest = (now - self.start) * max(self.flops - self.done_flops, 0.0) / max(self.done_flops, 1.0)
        return f"  {self.done} of about {self.rows} rows after {now - self.start:.0f} s; about {rest:.0f} s to go"


_FIRST_WORD, _NEXT_WORD = 2.0, 15.0
"""Seconds until the first estimate, and between two."""


@dataclass(slots=True)
class Run(Generic[Asked]):
    """The options of a run, and all that comes of it except its rows.

    say     prints a line about the progress
    parts   what the result file has that other benchmarks' files do not have
    pace    how much of the run is done
    """

    options: Asked
    say: Callable[[str], None]
    parts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)

    def begin(self, rows: int, flops: float) -> None:
        """Say how much will be measured: about `rows` rows, and `flops` in all, as `attempt` counts them."""
        self.pace = Pace(rows, flops)
        if rows > 1:
            self.say(f"About {rows} rows to measure; how long that takes is told after the first ones.")

    def advance(self, flops: float) -> None:
        """Count a row, and now and then say how long the rest will take."""
        line = self.pace.after(flops)
        if line:
            self.say(line)

    def attempt(
        self,
        make: Callable[[], R],
        shape: Shape,
        sizes: str,
        kind: str,
        what: str,
        peer: str | None = None,
        *,
        counts: bool = True,
    ) -> Iterator[R]:
        """The row that `make` returns, or nothing: what no backend serves and peers that fail or are absent are notes.

        what   names the case beside its kind in a failure
        peer   names what is timed where that is a peer
        counts   as a row of the estimate
        """
        try:
            row = make()
        except NoBackendError as error:
            self.notes.append(f"{kind}: {' '.join(str(error).split())[:300]}")
        except AbsentError as error:
            self.notes.append(str(error))
        except Exception as error:  # the others are worth having; the command fails at its end
            if peer is None:
                self.failures.append(Failure(f"{kind}, {what}", shape.key, sizes, in_one_line(error)))
            else:
                self.notes.append(f"{peer}: {in_one_line(error)[:160]}")
        else:
            if counts:
                self.advance(shape.flops)
            yield row
            return
        if counts:
            self.advance(shape.flops)


def problems(run: Run[Sized]) -> Iterator[tuple[Shape, str, tuple[int, ...]]]:
    """Each shape with each vector of group sizes and its name; the result file holds the sizes."""
    options = run.options
    groupings = run.parts.setdefault("groupings", {})
    each = options.rows_per_problem
    count = each * len(options.chosen_sizes)
    run.begin(count * len(options.chosen_shapes), count * sum(shape.flops for shape in options.chosen_shapes))
    for shape, name in product(options.chosen_shapes, options.chosen_sizes):
        sizes = sizes_of(shape, name, options.chosen_seed)
        groupings[f"{shape.label}, {name}"] = list(sizes)
        run.say(f"{shape.label}, {name} ...")
        yield shape, name, sizes
