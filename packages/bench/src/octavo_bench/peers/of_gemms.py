"""Which peers stand beside which GEMMs, by engine, and how they are timed: alone, and in turns with ours.

Each absent one is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.recipe_base import Gemm
from octavo_bench.errors import AbsentError
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.pacing import steady_times, steady_turns
from octavo_bench.harness.problem import Data
from octavo_bench.harness.results import in_one_line
from octavo_bench.harness.timing import Call, Times
from octavo_bench.peers.peer import ACCUMULATED, BATCHED, DENSE, Peer

_WAYS = (("fast", True), ("exact", False))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer before it is timed: `make` gives its call on one set of operands (x, w and dy by name)."""

    name: str
    sizes: str
    gemm: str
    make: Callable[[dict[Any, Any]], Call]


Judge = Callable[[Candidate, Any], str]
"""What the first result of a candidate's call is worth, for `Peer.match`; ValueError where it is wrong."""


def not_judged(candidate: Candidate, result: Any) -> str:
    """For peers whose operands are not those of the groups."""
    return ""


def timed(
    engine: Engine, data: Data, candidates: Iterable[Candidate], repeats: int, judge: Judge = not_judged
) -> list[Peer]:
    """Each candidate judged and timed by itself; what is absent, fails or is wrong is a note and has no time."""
    peers = []
    for one in candidates:
        try:
            calls = [one.make(operands) for operands in data.sets]
            match = judge(one, calls[0]())
            times = steady_times(engine, calls, repeats)
            peers.append(Peer(one.name, data.shape, one.sizes, one.gemm, times, match=match))
        except AbsentError as error:
            peers.append(Peer(one.name, data.shape, one.sizes, one.gemm, note=str(error)))
        except Exception as error:  # a peer that refuses says nothing of our kernels
            peers.append(Peer(one.name, data.shape, one.sizes, one.gemm, note=refused(one, error)))
    return peers


def refused(candidate: Candidate, error: Exception) -> str:
    """The note of a candidate that raised."""
    return f"{candidate.name} {candidate.gemm}: {in_one_line(error)[:160]}"


@dataclass(frozen=True, slots=True)
class InTurns:
    """A case's time and those of its peers, from the same turns; what a peer raised in between."""

    times: Times
    peers: dict[str, Times]
    notes: tuple[str, ...]


def timed_in_turns(
    engine: Engine, calls: Sequence[Call], data: Data, peers: Iterable[Candidate], repeats: int
) -> InTurns:
    """Our calls and each peer's in turns at the clocks of a long run; one that raises now takes no part."""
    ways, notes = {"": list(calls)}, []
    for one in peers:
        try:
            theirs = [one.make(operands) for operands in data.sets]
            theirs[0]()
        except Exception as error:  # it ran by itself, and may lack memory now
            notes.append(refused(one, error))
        else:
            ways[one.name] = theirs
    ours, *others = steady_turns(engine, list(ways.values()), repeats)
    return InTurns(ours, dict(zip(list(ways)[1:], others, strict=True)), tuple(notes))


def dense_peers(engine: Engine, data: Data, gemms: Sequence[Gemm]) -> Iterator[Candidate]:
    """cuBLAS at equal FLOPs, once per shape; none on a CPU, and none in JAX."""
    if engine.framework != "torch" or engine.device != "cuda":
        return
    from octavo_bench.peers.cublas import batched_call, dense_call
    from octavo_bench.peers.scaled_mm import scaled_batched_call, scaled_call

    def with_one_weight(call: Callable[..., Call], **options: Any) -> Callable[[dict[Any, Any]], Call]:
        return lambda operands: call(operands["x"], engine.normal((data.shape.n, data.shape.k), 1), **options)

    yield Candidate("dense bf16", DENSE, DENSE, with_one_weight(dense_call))
    for how, fast in _WAYS:
        yield Candidate(f"dense fp8 {how}", DENSE, DENSE, with_one_weight(scaled_call, fast=fast))
    for gemm in gemms:
        yield Candidate(f"dense bf16{BATCHED}", DENSE, gemm, partial(batched_call, gemm=gemm))
        for how, fast in _WAYS:
            batched = partial(scaled_batched_call, gemm=gemm, fast=fast)
            yield Candidate(f"dense fp8 {how}{BATCHED}", DENSE, gemm, batched)


def grouped_peers(engine: Engine, name: str, sizes: Sequence[int], gemms: Sequence[Gemm]) -> Iterator[Candidate]:
    """The framework's grouped GEMMs on groups of these sizes, which `name` names."""
    if engine.framework == "jax":
        from octavo_bench.peers.ragged_dot import ragged_dot_call

        for gemm in gemms:
            yield Candidate("ragged_dot", name, gemm, partial(ragged_dot_call, sizes=sizes, gemm=gemm))
        return
    from octavo_bench.peers.deepgemm import LIBRARY, deepgemm_call
    from octavo_bench.peers.grouped_mm import grouped_call
    from octavo_bench.peers.scaled_mm import scaled_grouped_call

    for gemm in gemms:
        yield Candidate("grouped_mm", name, gemm, partial(grouped_call, sizes=sizes, gemm=gemm))
        for how, fast in _WAYS if engine.device == "cuda" else ():
            scaled = partial(scaled_grouped_call, sizes=sizes, gemm=gemm, fast=fast)
            yield Candidate(f"scaled_grouped_mm {how}", name, gemm, scaled)
        for dtype in ("fp8", "bf16"):
            added = ACCUMULATED if gemm == "wgrad" else ""
            theirs = partial(deepgemm_call, sizes=sizes, gemm=gemm, dtype=dtype)
            yield Candidate(f"{LIBRARY} {dtype}{added}", name, gemm, theirs)
