"""Which cases have a version in plain torch that does the same work."""

from __future__ import annotations

from octavo_bench.harness.shapes import Grouping
from octavo_bench.peers.compile import Peer, quantizer_peer
from octavo_bench.quantize.case import Case


def peer_of(case: Case, grouping: Grouping, cols: int) -> Peer | None:
    """The torch version of a case in this grouping; None where there is none, or it would do other work."""
    aligned = all(size == grouping.sizes[0] and size % 128 == 0 for size in grouping.sizes) and cols % 128 == 0
    if not aligned or case.kind != "quantize" or not case.native:
        return None
    return quantizer_peer(str(case.recipe), case.outputs, swiglu=case.swiglu)
