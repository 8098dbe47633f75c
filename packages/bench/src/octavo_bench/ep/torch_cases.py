"""What `octavo bench ep --framework torch` measures: the cases of a table, in their order, and the answer to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from octavo.quantizer import ROW_BY_ROW
from octavo_bench.ep.options import EpOptions
from octavo_bench.ep.peers import LIGER, TORCH
from octavo_bench.harness.options import Names
from octavo_bench.harness.recipes import family_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: a recipe's kind on one process, or on `ranks` of them.

    way, route, payload   how tokens travel, as in EpRow; of Octavo's own layer on several processes
    peer                  the library whose layer it is; "" for Octavo's own
    """

    kind: str
    ranks: int
    way: str = ""
    route: str = ""
    payload: bool = False
    peer: str = ""

    @property
    def text(self) -> str:
        """The case in a line about progress or failure."""
        codes = " as codes" if self.payload else ""
        how = self.peer or f"{self.way} {self.route}{codes}"
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''} {how}".strip()


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command as every process gets them."""

    shape: Shape
    choices: int
    seed: int
    slack: float
    device: str
    backend: Names
    repeats: int
    weak: bool
    captured: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a case.

    times      of a step
    alone      of the same layer on one device, measured in turns with it
    received   bytes of the buffers that rank 0 receives in a step
    nvlink     bytes that it receives by NVLink's counters
    dropped    choices that all ranks together left out
    """

    times: Times
    alone: Times | None = None
    received: int | None = 0
    nvlink: int | None = None
    dropped: int = 0


def cases_of(options: EpOptions, ranks: int) -> Iterator[Case]:
    """The cases of a shape: every kind on one device and, where there are several, on all `ranks` of them."""
    for kind in options.chosen_kinds:
        yield Case(kind, 1)
        if ranks == 1:
            continue
        for way, route in product(options.chosen_ways, options.chosen_routes):
            yield Case(kind, ranks, way, route)
            if family_of(kind) in ROW_BY_ROW:
                yield Case(kind, ranks, way, route, payload=True)
        if kind == "bf16" and options.peers:
            yield Case(kind, ranks, peer=TORCH)
            if options.chosen_device == "cuda":
                yield Case(kind, ranks, peer=LIGER)


def in_order(cases: Iterator[Case], all_spread: bool) -> list[Case]:
    """The cases in an order in which no two measurements overlap: spawned processes go on to their next case while
    this process reads an answer.

    Cases of one device, which this process measures itself, come before all others; with `all_spread` the spawned
    processes measure them, too. LigerCute comes last, because it has processes of its own.
    """
    return sorted(cases, key=lambda case: (case.ranks > 1 and not all_spread, case.peer == LIGER))
