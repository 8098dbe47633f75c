"""The work of `octavo bench moe`: every kind of a shape made ready and compared, then all of them timed in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.pacing import steady_turns
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call
from octavo_bench.moe.benchmark import GATHERED, PEERS, TORCHS, MoeOptions, MoeRow
from octavo_bench.moe.peers import in_our_order, peer_calls
from octavo_bench.moe.torch import moe_calls
from octavo_bench.peers.gradients import FARTHEST, distance
from octavo_bench.training.moe import Layer, draw_layer, layer_backends

_WHAT = "MoE layer"


@dataclass(frozen=True)
class Way:
    """One kind's calls, which have run once, before they are timed."""

    kind: str
    backends: tuple[str, ...]
    calls: list[Call]
    match: str


def moe_rows(run: Run[MoeOptions]) -> Iterator[MoeRow]:
    """Peers, then each recipe; the rows of a shape when all of its kinds have been timed."""
    options = run.options
    engine = TorchEngine(options.chosen_device)
    kinds = (GATHERED, *(kind for kind in PEERS if kind != GATHERED)) if options.peers else ()
    count = len(options.chosen_kinds) + len(kinds)
    shapes = options.chosen_shapes
    run.begin(count * len(shapes), count * sum(shape.flops for shape in shapes))
    for shape in shapes:
        run.say(f"{shape.label} ...")
        layer = draw_layer(engine, shape, options.chosen_choices, options.chosen_seed)
        comparison = Comparison()
        ready: list[Way] = []
        for kind in (*kinds, *options.chosen_kinds):
            make = partial(_ready, layer, kind, options, comparison)
            peer = kind if kind in PEERS else None
            ready.extend(run.attempt(make, shape, "even", kind, _WHAT, peer, counts=False))
        comparison.clear()
        engine.release()
        yield from _timed(run, engine, shape, ready)
        del layer, ready
        engine.release()


def _timed(run: Run[MoeOptions], engine: TorchEngine, shape: Shape, ways: Sequence[Way]) -> Iterator[MoeRow]:
    order = (*PEERS, *run.options.chosen_kinds)
    ways = sorted(ways, key=lambda way: order.index(way.kind))
    if not ways:
        return
    turns = partial(steady_turns, engine, [way.calls for way in ways], run.options.chosen_repeats)
    for spent in run.attempt(turns, shape, "even", "all kinds", f"{_WHAT}, in turns", counts=False):
        for way, times in zip(ways, spent, strict=True):
            yield MoeRow(shape, run.options.chosen_choices, way.kind, way.backends, times, way.match)
            run.advance(shape.flops)


def _ready(layer: Layer, kind: str, options: MoeOptions, comparison: Comparison) -> Way:
    if kind in PEERS:
        calls = peer_calls(layer, kind)
        far = comparison.distance(in_our_order(kind, calls[0]()))
        if far is not None and kind not in TORCHS and not far <= FARTHEST:
            raise ValueError(f"its gradients differ from torch's by {far:.1%}, so its time does not count")
        return Way(kind, (), calls, _told(far))
    backends = layer_backends(layer, kind, options.chosen_backend)
    calls = moe_calls(layer, kind, options.chosen_backend)
    calls[0]()  # delayed scaling knows no amax in its first step
    return Way(kind, backends, calls, _told(comparison.distance(calls[0]())))


def _told(far: float | None) -> str:
    return "" if far is None else f"within {far:.1%}"


class Comparison:
    """Gradients of x, w1 and w2 beside the first ones that it is given; the router's are differences of sums."""

    def __init__(self) -> None:
        self._first: list[Tensor] = []

    def clear(self) -> None:
        """Gives the first ones' memory back."""
        self._first = []

    def distance(self, gradients: Sequence[Tensor]) -> float | None:
        """The farthest of the three by norm; None for the first ones."""
        x, _, w1, w2 = gradients
        compared = [x, w1, w2]
        if not self._first:
            self._first = compared
            return None
        return distance(compared, self._first)
