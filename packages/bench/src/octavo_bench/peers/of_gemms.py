"""Which peers stand beside which GEMMs, by engine, and how they are timed. Each absent one is a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.pacing import steady_times
from octavo_bench.harness.problem import Data
from octavo_bench.harness.results import in_one_line
from octavo_bench.harness.timing import Call
from octavo_bench.peers.peer import BATCHED, DENSE, Peer

_WAYS = (("fast", True), ("exact", False))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer before it is timed: `make` gives its call on one set of operands (x, w and dy by name)."""

    name: str
    sizes: str
    gemm: str
    make: Callable[[dict[Any, Any]], Call]


def timed(engine: Engine, data: Data, candidates: Iterable[Candidate], repeats: int) -> list[Peer]:
    """Each candidate timed; what fails is a note."""
    peers = []
    for one in candidates:
        try:
            calls = [one.make(operands) for operands in data.sets]
            times = steady_times(engine, calls, repeats)
            peers.append(Peer(one.name, data.shape, one.sizes, one.gemm, times))
        except Exception as error:  # a peer that is absent or refuses says nothing of our kernels
            note = f"{one.name} {one.gemm}: {in_one_line(error)[:160]}"
            peers.append(Peer(one.name, data.shape, one.sizes, one.gemm, note=note))
    return peers


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
    from octavo_bench.peers.grouped_mm import grouped_call
    from octavo_bench.peers.scaled_mm import scaled_grouped_call

    for gemm in gemms:
        yield Candidate("grouped_mm", name, gemm, partial(grouped_call, sizes=sizes, gemm=gemm))
        for how, fast in _WAYS if engine.device == "cuda" else ():
            scaled = partial(scaled_grouped_call, sizes=sizes, gemm=gemm, fast=fast)
            yield Candidate(f"scaled_grouped_mm {how}", name, gemm, scaled)
