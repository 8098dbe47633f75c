"""The engine of torch: CUDA events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.formats import DType
from octavo_bench.harness.engine.protocol import BUDGET_MS
from octavo_bench.harness.engine.values import F32, magnitude
from octavo_bench.harness.timing import (
    Call,
    Times,
    affordable,
    cuda_times,
    cuda_times_in_turn,
    host_times,
    host_times_in_turn,
)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int64": torch.int64}
_COPIED = 1 << 29


class TorchEngine:
    """See `Engine`."""

    framework = "torch"

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda = device == "cuda"
        self.arch: tuple[int, int] | None = torch.cuda.get_device_capability() if self.cuda else None
        self.where: Literal["host", "device"] = "device" if self.cuda else "host"
        self.cache_bytes: int = torch.cuda.get_device_properties(0).L2_cache_size if self.cuda else 0

    def normal(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """See `Engine`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        scale = self._scale(shape[-2], 1 if len(shape) == 2 else 128)[:, None]
        if len(shape) == 3:
            scale = scale * self._scale(shape[-1], 128)
        return values.mul_(scale)

    def _scale(self, count: int, width: int) -> Tensor:
        return torch.from_numpy(magnitude(count, width)).to(self.device, torch.bfloat16)

    def array(self, values: Sequence[float] | Sequence[int], dtype: str) -> Tensor:
        """See `Engine`."""
        return torch.tensor(values, dtype=_DTYPES[dtype], device=self.device)

    def full(self, shape: tuple[int, ...], dtype: DType, value: float) -> Tensor:
        """See `Engine`."""
        return torch.full(shape, value, dtype=_DTYPES[dtype], device=self.device)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch runs it as it is."""
        return function

    def sizes_for(self, backend: str, sizes: Any, rows: int) -> Any:
        """torch-native computes a plan from the sizes once per layer; other backends take the sizes."""
        if backend != "torch-native":
            return sizes
        import octavo_torch_native

        return octavo_torch_native.index_groups(sizes, rows, sizes)

    def take(self, array: Tensor, index: npt.NDArray[np.int64], axis: int) -> Tensor:
        """See `Engine`."""
        return array.index_select(axis, torch.from_numpy(index).to(array.device))

    def host(self, array: Tensor) -> F32:
        """See `Engine`."""
        values: F32 = array.detach().float().cpu().numpy()
        return values

    def times(self, calls: Sequence[Call], repeats: int) -> Times:
        """See `Engine`."""
        if not self.cuda:
            return host_times(_in_turn(calls), repeats, warmup=1)
        return cuda_times(calls, affordable(repeats, _lasted([calls]), BUDGET_MS), warm_ms=10.0)

    def times_in_turns(self, ways: Sequence[Sequence[Call]], repeats: int) -> list[Times]:
        """See `Engine`."""
        if not self.cuda:
            return host_times_in_turn(ways, repeats)
        return cuda_times_in_turn(ways, affordable(repeats, _lasted(ways), len(ways) * BUDGET_MS), warm_ms=20.0)

    def batch(self, calls: Sequence[Call], count: int) -> float:
        """See `Engine`."""
        start = time.perf_counter()
        for index in range(count):
            calls[index % len(calls)]()
        if self.cuda:
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / count

    def copy_rate(self) -> float | None:
        """See `Engine`."""
        if not self.cuda:
            return None
        source = torch.zeros(_COPIED, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * _COPIED / cuda_times([lambda: target.copy_(source)], 20, warm_ms=100.0).median / 1e6

    def release(self) -> None:
        """See `Engine`."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def _lasted(ways: Sequence[Sequence[Call]]) -> float:
    """Microseconds of one call of each way, after one that warms up, on a GPU."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for calls in ways:
            calls[0]()
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def _in_turn(calls: Sequence[Call]) -> Call:
    index = -1

    def call() -> Any:
        nonlocal index
        index = (index + 1) % len(calls)
        return calls[index]()

    return call
