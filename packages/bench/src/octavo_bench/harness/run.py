"""A run while it goes on: rows that fail are recorded, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from octavo import NoBackendError
from octavo_bench.harness.options import Options, SizesOption
from octavo_bench.harness.results import Failure, in_one_line
from octavo_bench.harness.shapes import Shape, sizes_of

Asked = TypeVar("Asked", bound=Options)
Sized = TypeVar("Sized", bound=SizesOption)
R = TypeVar("R")


@dataclass(slots=True)
class Run(Generic[Asked]):
    """What was asked for, and what becomes of it beside rows.

    say    hears where the run is
    parts  of the result file, beside what all files have
    """

    options: Asked
    say: Callable[[str], None]
    parts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def attempt(
        self, make: Callable[[], R], shape: Shape, sizes: str, kind: str, what: str, peer: str | None = None
    ) -> Iterator[R]:
        """The row that `make` returns, or nothing: what no backend serves and peers that fail are notes.

        what   names the case beside its kind in a failure
        peer   names what is timed where that is a peer
        """
        try:
            row = make()
        except NoBackendError as error:
            self.notes.append(f"{kind}: {' '.join(str(error).split())[:300]}")
        except Exception as error:  # the others are worth having; the command fails at its end
            if peer is None:
                self.failures.append(Failure(f"{kind}, {what}", shape.key, sizes, in_one_line(error)))
            else:
                self.notes.append(f"{peer}: {in_one_line(error)[:160]}")
        else:
            yield row


def problems(run: Run[Sized]) -> Iterator[tuple[Shape, str, tuple[int, ...]]]:
    """Each shape with each vector of group sizes and its name; the result file holds the sizes."""
    options = run.options
    groupings = run.parts.setdefault("groupings", {})
    for shape, name in product(options.chosen_shapes, options.chosen_sizes):
        sizes = sizes_of(shape, name, options.chosen_seed)
        groupings[f"{shape.label}, {name}"] = list(sizes)
        run.say(f"{shape.label}, {name} ...")
        yield shape, name, sizes
