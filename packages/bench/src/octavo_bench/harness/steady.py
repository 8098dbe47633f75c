"""Times at the clocks of a long run: a GPU that has been idle runs above them until its power limit takes hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.timing import Call, Times

STEADY_MS = 100.0
"""Of the same work before it is timed. An H200 ran 784 TFLOP/s at first and 690 from a tenth of a second on."""

_MOST_CALLS = 5000


def steady_times(engine: Engine, calls: Sequence[Call], repeats: int) -> Times:
    """`engine.times`, on a GPU behind `STEADY_MS` of the calls: what was measured before then matters to no peer."""
    if engine.device == "cuda":
        engine.batch(calls, 1)
        engine.batch(calls, min(math.ceil(1e3 * STEADY_MS / engine.batch(calls, 2)), _MOST_CALLS))
    return engine.times(calls, repeats)
