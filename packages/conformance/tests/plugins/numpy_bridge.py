"""A front end for numpy arrays, as small as one can be: the suite's own tests need a framework of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy_recording import Listeners, memory_of

import octavo_numerics
from octavo import GroupedTensorSpec, QuantizerSpec, Recipe, check_group_sizes
from octavo.quantizer import Operand
from octavo_numerics import QuantizedArray
from octavo_registry import plan, plan_layer
from octavo_registry.contract.frameworks import Device, LayerResult
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.quantize import BoundQuantize
from octavo_registry.contract.recording import MakeRecorder
from octavo_registry.contract.request import Request


class Watched(np.ndarray[Any, Any]):
    """An array that notes who takes its values to the host."""

    log: list[str]

    def tolist(self) -> Any:
        """Notes the read."""
        self.log.append("tolist")
        return self.view(np.ndarray).tolist()


def _sizes(sizes: Any, rows: int) -> tuple[Any, str]:
    if isinstance(sizes, list):
        check_group_sizes(sizes, rows)
        return np.array(sizes, dtype=np.int32), "host"
    return sizes, "device"


def _dtype(array: Any) -> Any:
    return array.dtype.name


class NumpyBridge:
    """See `octavo_registry.Framework`. An ndarray of sizes stands for one on a device: never checked."""

    name = "numpy"

    def version(self) -> str:
        """numpy's version."""
        return np.__version__

    def devices(self) -> Sequence[Device]:
        """The CPU."""
        return [Device("cpu", None, "numpy")]

    def from_numpy(self, array: Any, device: str = "cpu") -> Any:
        """The array itself."""
        return array

    def to_numpy(self, array: Any) -> Any:
        """The array itself."""
        return np.asarray(array)

    def grouped_tensor(self, spec: GroupedTensorSpec, group_sizes: Any, arrays: Mapping[str, Any]) -> Any:
        """The definition's own class."""
        return QuantizedArray(spec=spec, group_sizes=group_sizes, **arrays)

    def quantize(
        self,
        x: Any,
        spec: QuantizerSpec,
        group_sizes: Any = None,
        *,
        seed: int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Any = None,
        backend: str | Sequence[str] | None = None,
    ) -> Any:
        """Through the registry."""
        stacked = x.ndim == 3
        sizes, where = _sizes([len(x)] if group_sizes is None and not stacked else group_sizes, len(x))
        request = Request(
            op="quantize",
            framework="numpy",
            device="cpu",
            in_dtype=_dtype(x),
            out_dtype=_dtype(x),
            quantizer=spec,
            k=x.shape[-1],
            groups=len(x) if stacked else len(sizes),
            stacked=stacked,
            sizes=where,  # type: ignore[arg-type]
        )
        run = plan(request, backend=backend).run
        return run(x, sizes, seed=seed, operand=operand or spec.role, group_offset=group_offset, scale=scale)

    def grouped_linear(
        self,
        x: Any,
        w: Any,
        group_sizes: Any,
        dy: Any = None,
        *,
        recipe: Recipe,
        bias: Any = None,
        seed: int | None = None,
        scales: Mapping[str, Any] | None = None,
        group_offset: int = 0,
        backend: str | Sequence[str] | None = None,
        compiled: bool = False,
    ) -> LayerResult:
        """Quantize each operand once, then the three GEMMs."""
        sizes, where = _sizes(group_sizes, len(x))
        G, N, K = w.shape
        request = Request(
            op="fprop",
            framework="numpy",
            device="cpu",
            in_dtype=_dtype(x),
            out_dtype=_dtype(x),
            recipe=recipe,
            k=K,
            n=N,
            groups=G,
            sizes=where,  # type: ignore[arg-type]
            training=dy is not None,
        )
        layer = plan_layer(request, backend=backend)

        def operand(name: Operand, array: Any, quantizer: Plan | None) -> dict[str, Any]:
            if quantizer is None:
                return {}
            assert quantizer.request.quantizer is not None
            stochastic = quantizer.request.quantizer.stochastic
            tensor = quantizer.run(
                array,
                None if name == "w" else sizes,
                seed=seed if stochastic else None,
                operand=name,
                group_offset=group_offset,
                scale=None if scales is None else scales[name],
            )
            return {name: tensor}

        made = operand("x", x, layer.quantize_x) | operand("w", w, layer.quantize_w)
        if dy is not None:
            made |= operand("dy", dy, layer.quantize_dy)

        def pick(gemm: Any, name: str, array: Any) -> Any:
            return made[name] if recipe.quantizes(gemm) else array

        y = layer.fprop.run(pick("fprop", "x", x), pick("fprop", "w", w), sizes, bias=bias)
        if layer.dgrad is None or layer.wgrad is None:
            return LayerResult(y)
        dx = layer.dgrad.run(pick("dgrad", "dy", dy), pick("dgrad", "w", w), sizes)
        dw = layer.wgrad.run(pick("wgrad", "x", x), pick("wgrad", "dy", dy), sizes)
        return LayerResult(y, dx, dw, None if bias is None else _dbias(dy, sizes))

    def rounding_first(self, bound: BoundQuantize[Any, Any], spec: QuantizerSpec) -> BoundQuantize[Any, Any]:
        """The definition's rounding of weights, before the backend's quantizer."""
        assert spec.mxfp4 is not None
        direction = spec.mxfp4

        def run(x: Any, group_sizes: Any = None, /, **how: Any) -> QuantizedArray:
            values = octavo_numerics.round_mxfp4(x, direction).astype(ml_dtypes.bfloat16)
            q: QuantizedArray = bound.run(values, group_sizes, **how)
            return replace(q, spec=GroupedTensorSpec(**{**dict(q.spec), "quantizer": spec}))

        return BoundQuantize(run)

    def host_reads(self, function: Callable[..., Any], *arrays: Any) -> Sequence[str]:
        """Runs it on watched arrays."""
        log: list[str] = []
        watched = []
        for array in arrays:
            view = array.view(Watched)
            view.log = log
            watched.append(view)
        function(*watched)
        return log

    def write_down(
        self, make: MakeRecorder[Any], call: Callable[[], Any], arrays: Sequence[Any]
    ) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """See `octavo_registry.contract.frameworks.Recording`: the result has the last number."""
        recorder = make(arrays[0])
        for array in arrays:
            recorder.name(*memory_of(array), False)
        Listeners.memory = recorder.name
        with recorder:
            y = call()
        Listeners.memory = None
        if recorder.refusal is not None:
            raise ValueError(recorder.refusal)

        def again(others: Sequence[Any]) -> Any:
            made = np.empty_like(y)
            addresses = [memory_of(array)[0] for array in (*others, made)]
            recorder.run(addresses, made, 0, len(recorder.arrays()))
            return made

        return y, again


def _dbias(dy: Any, sizes: Any) -> Any:
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    sums = [dy[bounds[g] : bounds[g + 1]].astype(np.float64).sum(axis=0) for g in range(len(sizes))]
    return np.stack(sums).astype(np.float32).astype(dy.dtype)


BRIDGE = NumpyBridge()
