"""The frameworks' own GEMMs of the same work, timed in the same run: each absent one is a note.

torch._grouped_mm          bf16, grouped, all three GEMMs
torch._scaled_grouped_mm   FP8 codes with a scale a row, fast accumulation and exact
torch.mm                   one dense bf16 product of equal FLOPs, [M, K] x [K, N]: cuBLAS
torch._scaled_mm           the same in FP8 with one scale, fast and exact: cuBLAS
jax.lax.ragged_dot         bf16, grouped, all three GEMMs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.problem import Data
from octavo_bench.harness.results import told
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.steady import steady_times
from octavo_bench.harness.timing import Call, Times

DENSE = "dense"
"""The gemm and the sizes of a peer that has no groups."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's time, or the reason why it has none. gemm and sizes are "dense" for one without groups."""

    name: str
    shape: Shape
    sizes: str
    gemm: str
    times: Times | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        """Its rate."""
        return None if self.times is None else self.shape.tflops(self.times.median)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "peer": self.name,
            "shape": list(self.shape.key),
            "sizes": self.sizes,
            "gemm": self.gemm,
            "us": None if self.times is None else round(self.times.median, 3),
            "tflops": None if self.tflops is None else round(self.tflops, 1),
            "note": self.note,
        }


Make = Callable[[int], Call]
"""The call on one set of operands."""


def timed(engine: Engine, data: Data, plan: Iterator[tuple[str, str, str, Make]], repeats: int) -> list[Peer]:
    """Each peer of `plan` (name, sizes, gemm, how its call is made) timed; what fails is a note."""
    found = []
    for name, sizes, gemm, make in plan:
        try:
            calls = [make(at) for at in range(len(data.sets))]
            found.append(Peer(name, data.shape, sizes, gemm, steady_times(engine, calls, repeats)))
        except Exception as error:  # a peer that is absent or refuses says nothing of our kernels
            found.append(Peer(name, data.shape, sizes, gemm, note=f"{name} {gemm}: {told(error)[:160]}"))
    return found


def dense_peers(engine: Engine, data: Data) -> Iterator[tuple[str, str, str, Make]]:
    """cuBLAS at equal FLOPs; none on a CPU, in JAX none either."""
    if engine.framework != "torch" or engine.device != "cuda":
        return
    yield "dense bf16", DENSE, DENSE, lambda at: _torch_dense(engine, data, at)
    for how, fast in (("fast", True), ("exact", False)):
        yield f"dense fp8 {how}", DENSE, DENSE, lambda at, fast=fast: _torch_dense_fp8(engine, data, at, fast)  # type: ignore[misc]


def grouped_peers(
    engine: Engine, data: Data, name: str, sizes: Sequence[int], gemms: Sequence[Gemm]
) -> Iterator[tuple[str, str, str, Make]]:
    """The framework's grouped GEMMs."""
    for gemm in gemms:
        if engine.framework == "jax":
            yield "ragged_dot", name, gemm, lambda at, gemm=gemm: _ragged_dot(engine, data, at, sizes, gemm)  # type: ignore[misc]
            continue
        yield "grouped_mm", name, gemm, lambda at, gemm=gemm: _torch_grouped(engine, data, at, sizes, gemm)  # type: ignore[misc]
        if engine.device == "cuda":
            for how, fast in (("fast", True), ("exact", False)):
                yield (
                    f"scaled_grouped_mm {how}",
                    name,
                    gemm,
                    lambda at, gemm=gemm, fast=fast: _torch_grouped_fp8(engine, data, at, sizes, gemm, fast),  # type: ignore[misc]
                )


def _torch_dense(engine: Engine, data: Data, at: int) -> Call:
    import torch

    x, shape = data.sets[at]["x"], data.shape
    w = engine.normal((shape.n, shape.k), 1)
    out = torch.empty(shape.rows, shape.n, dtype=torch.bfloat16, device=x.device)
    return lambda: torch.mm(x, w.t(), out=out)


def _torch_dense_fp8(engine: Engine, data: Data, at: int, fast: bool) -> Call:
    import torch

    a = _codes(data.sets[at]["x"])
    b = _codes(engine.normal((data.shape.n, data.shape.k), 1))
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def check_aligned(sizes: Sequence[int], to: int, what: str) -> None:
    """ValueError where torch's grouped GEMM does not take sums of these lengths."""
    # torch asserts this on the device, which would end the process
    if any(size % to for size in sizes):
        raise ValueError(f"{what} needs group sizes in multiples of {to}")


def _ends(engine: Engine, sizes: Sequence[int]) -> Any:
    import torch

    return torch.cumsum(engine.array(list(sizes), "int64"), 0).to(torch.int32)


def _torch_grouped(engine: Engine, data: Data, at: int, sizes: Sequence[int], gemm: Gemm) -> Call:
    import torch

    arrays, ends = data.sets[at], _ends(engine, sizes)
    x, w, dy = arrays["x"], arrays["w"], arrays["dy"]
    if gemm == "wgrad":
        check_aligned(sizes, 8, "torch's wgrad")
        return lambda: torch._grouped_mm(dy.t(), x, offs=ends)
    if gemm == "fprop":
        return lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    return lambda: torch._grouped_mm(dy, w, offs=ends)


def _torch_grouped_fp8(engine: Engine, data: Data, at: int, sizes: Sequence[int], gemm: Gemm, fast: bool) -> Call:
    import torch

    arrays, shape, ends = data.sets[at], data.shape, _ends(engine, sizes)
    if gemm == "wgrad":
        check_aligned(sizes, 16, "torch's FP8 wgrad")
        left, right = _codes(arrays["dy"].t().contiguous()), _codes(arrays["x"].t().contiguous()).t()
        scales = shape.groups * shape.n, shape.groups * shape.k
    else:
        forward = gemm == "fprop"
        left = _codes(arrays["x" if forward else "dy"])
        w = arrays["w"] if forward else arrays["w"].transpose(1, 2).contiguous()
        right = _codes(w).transpose(1, 2)
        scales = shape.rows, (shape.groups, shape.n if forward else shape.k)  # type: ignore[assignment]
    one, two = (torch.ones(side, dtype=torch.float32, device=left.device) for side in scales)
    return lambda: torch._scaled_grouped_mm(
        left, right, one, two, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _codes(values: Any) -> Any:
    import torch

    return values.to(torch.float8_e4m3fn)


def _ragged_dot(engine: Engine, data: Data, at: int, sizes: Sequence[int], gemm: Gemm) -> Call:
    import jax

    arrays, held = data.sets[at], engine.array(list(sizes), "int64")
    x, w, dy = arrays["x"], arrays["w"], arrays["dy"]
    if gemm == "fprop":
        forward = jax.jit(lambda x, w, held: jax.lax.ragged_dot(x, w.swapaxes(1, 2), held))
        return lambda: forward(x, w, held)
    if gemm == "dgrad":
        backward = jax.jit(lambda dy, w, held: jax.lax.ragged_dot(dy, w, held))
        return lambda: backward(dy, w, held)

    def weights(x: Any, w: Any, dy: Any, held: Any) -> Any:
        return jax.vjp(lambda matrices: jax.lax.ragged_dot(x, matrices.swapaxes(1, 2), held), w)[1](dy)[0]

    gradient = jax.jit(weights)
    return lambda: gradient(x, w, dy, held)
