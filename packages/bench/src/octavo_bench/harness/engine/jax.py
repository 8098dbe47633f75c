"""The engine of JAX: calls are queued in batches, and the host waits for the last one of each."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

import octavo_registry as registry
from octavo.formats import DType
from octavo_bench.harness.engine.protocol import BUDGET_MS
from octavo_bench.harness.engine.values import F32, magnitude
from octavo_bench.harness.timing import Call, Times, affordable, summary, times_in_turn

_BATCHES = 5
_MOST_PER_BATCH = 100


class JaxEngine:
    """See `Engine`. JAX has no events: a time is that of a whole batch over its calls, launches included.

    A batch is long enough that the wait at its end, tens of microseconds, is no part of a call's time.
    """

    framework = "jax"
    where: Literal["host", "device"] = "device"
    cache_bytes = 0

    def __init__(self, device: str) -> None:
        self.device = device
        self._at = jax.devices("gpu" if device == "cuda" else device)[0]
        kinds = {seen.kind: seen.arch for seen in registry.framework("jax").devices()}
        self.arch: tuple[int, int] | None = kinds.get(device)
        jax.config.update("jax_default_device", self._at)  # type: ignore[no-untyped-call]

    def normal(self, shape: tuple[int, ...], seed: int) -> Array:
        """See `Engine`."""
        rows = jnp.asarray(magnitude(shape[-2], 1 if len(shape) == 2 else 128))[:, None]
        cols = jnp.asarray(magnitude(shape[-1], 128) if len(shape) == 3 else np.ones(shape[-1], np.float32))

        def draw(key: Array, rows: Array, cols: Array) -> Array:
            values = jax.random.normal(key, shape, jnp.bfloat16)
            return values * rows.astype(jnp.bfloat16) * cols.astype(jnp.bfloat16)

        values: Array = jax.jit(draw)(jax.random.key(seed), rows, cols)
        return values

    def array(self, values: Sequence[float] | Sequence[int], dtype: str) -> Array:
        """See `Engine`; integers are int32, as JAX has them."""
        return jnp.asarray(values, dtype="int32" if dtype == "int64" else dtype)

    def full(self, shape: tuple[int, ...], dtype: DType, value: float) -> Array:
        """See `Engine`."""
        return jnp.full(shape, value, dtype)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """jit."""
        return jax.jit(function)

    def sizes_for(self, backend: str, sizes: Any, rows: int) -> Any:
        """The sizes: XLA shares what it computes from them inside one program."""
        return sizes

    def take(self, array: Array, index: npt.NDArray[np.int64], axis: int) -> Array:
        """See `Engine`."""
        return jnp.take(array, index, axis=axis)

    def host(self, array: Array) -> F32:
        """See `Engine`."""
        return np.asarray(array.astype(jnp.float32))

    def times(self, calls: Sequence[Call], repeats: int) -> Times:
        """See `Engine`."""
        each = self._calls_of_a_batch(calls, repeats)
        return summary([self.batch(calls, each) for _ in range(_BATCHES)])

    def times_in_turns(self, ways: Sequence[Sequence[Call]], repeats: int) -> list[Times]:
        """See `Engine`; whole batches take turns."""
        counts = [self._calls_of_a_batch(calls, repeats) for calls in ways]
        batches = [[partial(self.batch, calls, count)] for calls, count in zip(ways, counts, strict=True)]
        return times_in_turn(batches, _BATCHES, lambda calls: [call() for call in calls])

    def _calls_of_a_batch(self, calls: Sequence[Call], repeats: int) -> int:
        """Of a call that is compiled here, and whose time then says how many of it are long enough."""
        _wait(calls[0]())
        start = time.perf_counter()
        _wait(calls[0]())
        lasted = 1e6 * (time.perf_counter() - start)
        long_enough = math.ceil(1e3 * BUDGET_MS / _BATCHES / lasted) if self.device == "cuda" else 1
        return max(-(-affordable(repeats, lasted, BUDGET_MS) // _BATCHES), min(long_enough, _MOST_PER_BATCH))

    def batch(self, calls: Sequence[Call], count: int) -> float:
        """See `Engine`."""
        start = time.perf_counter()
        for index in range(count):
            last = calls[index % len(calls)]()
        _wait(last)
        return 1e6 * (time.perf_counter() - start) / count

    def copy_rate(self) -> float | None:
        """XLA removes copies, so there is nothing to time."""
        return None

    def release(self) -> None:
        """See `Engine`."""
        gc.collect()


def _wait(result: Any) -> None:
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]
