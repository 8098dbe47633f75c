"""A backend made of the definition and numpy's fp32 products, honest or with one fault."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy_around import write_around
from numpy_delayed import record_in_place, update_in_place
from numpy_forms import Multiplied, with_two_forms
from numpy_fused import act_quantize, act_values, dact_quantize, dact_values, norm_quantize
from numpy_optimizer import step_in_place
from numpy_packed import of_mxfp4
from numpy_recording import Recorder, launch
from numpy_results import with_results
from numpy_scales import LOWER, OF_OTHER_BLOCKS, with_lower_scales, with_scales_of_other_blocks
from numpy_sums import sums_of_14_bits

import octavo_numerics
from octavo.quantizer import Direction
from octavo.recipe_base import GEMMS
from octavo_numerics import QuantizedArray
from octavo_registry.contract import (
    OPERATIONS,
    PLANES,
    Backend,
    BoundActQuantize,
    BoundDactQuantize,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    Request,
)
from octavo_registry.contract.cards import QUANTIZERS

FUSED: dict[str, Any] = {
    "act_quantize": act_quantize,
    "dact_quantize": dact_quantize,
    "norm_quantize": norm_quantize,
}
_LARGEST_FP16 = np.float16(65504)
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def clamp(sizes: Any, rows: int) -> Any:
    """[G] int64: no size below 0, none past the rows that are left."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, dtype=np.int64), 0)), rows)
    return np.diff(ends, prepend=0)


def nudge(x: Any, away: bool) -> Any:
    """Values beside the largest ones, moved one ulp from zero: a tie is no tie any more."""
    wide = x.astype(np.float32)
    small = np.abs(wide) < np.abs(np.nan_to_num(wide)).max(initial=0) / 2
    moved = np.nextafter(wide, np.sign(wide) * np.float32(np.inf)) if away else np.zeros_like(wide)
    return np.where(small & (wide != 0), moved, wide)


class NumpyBackend(Backend):
    """`fault` names what it does wrong; None: nothing."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self._calls = 0

    def refuses(self, request: Request) -> str | None:
        """Nothing."""
        return None

    def bind(self, request: Request) -> Any:
        """The function of the request's operation."""
        op = request.op

        def run(*operands: Any, **rest: Any) -> Any:
            self._calls += 1
            if op in FUSED:
                return self._fused(request, *operands, **rest)
            if self.fault == "narrow-sizes":
                operands = tuple(_as_int32(each) for each in operands)
            function = partial(getattr(self, op), request)
            result = launch(function, *operands, **rest) if op == "fprop" else function(*operands, **rest)
            self._write(op, *operands)
            return result

        if op == "quantize" or (op in GEMMS and self.fault != "stale-codes"):
            run = with_results(self.fault, run)
        bound = OPERATIONS[op].bound(run)
        if op in QUANTIZERS:
            bound = with_two_forms(self.fault, self._values, bound)
        if isinstance(bound, BoundQuantize):
            bound = replace(
                bound,
                with_amax=lambda x, sizes=None, /, **how: self._with_amax(run, x, sizes, how),
                record_amax=partial(record_in_place, self.fault),
                update_scales=partial(update_in_place, self.fault),
            )
        if isinstance(bound, BoundQuantize) and request.stacked:
            packed = partial(of_mxfp4, self.fault, DTYPES[request.in_dtype], run)
            interleaved = partial(self._interleaved_codes, run)
            return replace(bound, of_mxfp4=packed, interleaved=interleaved)
        if isinstance(bound, BoundFprop):
            return replace(bound, recorder=partial(Recorder, self.fault))
        if isinstance(bound, BoundActQuantize):
            return replace(bound, values=partial(act_values, self.fault, request))
        if isinstance(bound, BoundDactQuantize):
            return replace(bound, values=partial(dact_values, self.fault, request))
        if isinstance(bound, BoundWgrad):
            return replace(bound, interleaved=lambda block: self._interleaved_dw(run, block, request.weight))
        return bound

    def _fused(self, request: Request, *operands: Any, wanted: Any = None, **rest: Any) -> Any:
        """All extras, whichever are wanted."""
        if self.fault == "unwanted" and wanted is not None:
            raise TypeError("got an unexpected keyword argument 'wanted'")
        result = FUSED[request.op](self.quantize, self.fault, request, *operands, **rest)
        if self.fault == "writes-fused":
            operands[0][...] = 0
        return result

    def _write(self, op: str, x: Any, *others: Any) -> None:
        """Scratch space that is the caller's, where that is the fault."""
        if self.fault == "writes-x" and op == "quantize":
            x[...] = 0
        if self.fault == "writes-codes" and isinstance(x, QuantizedArray):
            (x.rowwise if x.rowwise is not None else x.columnwise).view(np.uint8)[...] = 0
        if self.fault == "writes-sizes" and op in GEMMS:
            others[-1][...] = 0

    def _with_amax(self, run: Any, x: Any, sizes: Any, how: Any) -> tuple[QuantizedArray, Any]:
        """The codes, and the largest magnitude of each group; the fault takes rows past the sum to the last one."""
        values = np.abs(x.astype(np.float32))
        if sizes is None:
            return run(x, sizes, **how), values.max((1, 2))
        ends = np.cumsum(clamp(sizes, len(x)))
        starts = [0, *ends[:-1]]
        if self.fault == "amax-of-tail":
            ends[-1] = len(x)
        amax = [values[a:b].max(initial=0) for a, b in zip(starts, ends, strict=True)]
        return run(x, sizes, **how), np.array(amax, np.float32)

    # Interleaved rows of gate and up

    def _halves(self, w: Any, block: int, axis: int) -> Any:
        """`w` with the gate half first; the fault puts the up half there."""
        first = w.shape[axis] // 2
        order = np.arange(w.shape[axis]).reshape(-1, 2, block).swapaxes(0, 1).ravel()
        return np.take(w, np.roll(order, first) if self.fault == "up-first" else order, axis)

    def _interleaved_codes(self, run: Any, block: int, weight: str) -> Any:
        """None for blocks of two rows."""
        axis = 1 if weight == "nk" else 2
        if block == 2:
            return None

        def quantize(w: Any, sizes: None = None, /, **how: Any) -> QuantizedArray:
            q: QuantizedArray = run(self._halves(w, block, axis), sizes, **how)
            return q

        def amax_of(w: Any) -> Any:
            largest = np.abs(w.astype(np.float32)).max((1, 2))
            return np.nan_to_num(largest, nan=0.0) if self.fault == "amax-without-nan" else largest

        def into(
            w: Any, sizes: None = None, /, *, out: Any, amax: Any = None, unchanged: Any = None, **how: Any
        ) -> None:
            if unchanged is not None and unchanged[0] and self.fault != "always-written":
                return
            made = quantize(w, sizes, **how)
            for name in PLANES:
                if getattr(out, name) is not None:
                    getattr(out, name)[...] = getattr(made, name)
                    write_around(self.fault, getattr(out, name))
            if amax is not None:
                amax[...] = amax_of(w)

        with_amax = lambda w, sizes=None, /, **how: (quantize(w, sizes, **how), amax_of(w))  # noqa: E731
        return BoundQuantize(quantize, with_amax=with_amax, into=into)

    def _interleaved_dw(self, run: Any, block: int, weight: str) -> Any:
        """None for blocks of two rows."""
        axis = 1 if weight == "nk" else 2
        if block == 2:
            return None

        def wgrad(x: Any, dy: Any, sizes: Any, /, *, out: Any = None, accumulate: bool = False) -> Any:
            halves = self._halves(out, block, axis) if accumulate else out
            dw = run(x, dy, sizes, out=halves, accumulate=accumulate)
            numbers = np.arange(dw.shape[axis]).reshape(2, -1, block).swapaxes(0, 1).ravel()
            interleaved = np.take(dw, numbers, axis)
            if out is None:
                return interleaved
            if self.fault == "gaps-written":
                out.base[...] = 0
            out[...] = interleaved
            return out

        return BoundWgrad(wgrad, limited=lambda most: wgrad)

    # Quantizers

    def quantize(self, request: Request, x: Any, sizes: Any, **rest: Any) -> QuantizedArray:
        """The definition, then the fault."""
        assert request.quantizer is not None
        spec, fault = request.quantizer, self.fault
        given = None if sizes is None else clamp(sizes, len(x))
        if fault == "syncs" and sizes is not None:
            sizes.tolist()
        if fault == "half-away":
            x = nudge(x, away=True)
        if fault == "flushes":
            tiny = (np.abs(x.astype(np.float32)) < np.finfo(np.float32).tiny) & (x != 0)
            x = np.where(tiny, x.dtype.type(0), x)
        if fault == "no-group-offset" or (fault == "fused-offset" and request.op in FUSED):
            rest["group_offset"] = 0
        if fault == "one-seed" and rest.get("seed") is not None:
            rest["seed"] = 0
        if fault == "leaks-tail" and given is not None:
            tail = x[int(given.sum()) :].astype(np.float32)
            x = x.copy()
            if tail.size and not np.isfinite(tail).all():
                x[0, 0] = np.nan
        q = octavo_numerics.quantize(x, spec, given, **rest)
        if fault == "other-spec":
            q = replace(q, spec=q.spec.model_copy(update={"quantizer": spec.model_copy(update={"role": "dy"})}))
        if fault == "other-sizes" and q.group_sizes is not None:
            q = replace(q, group_sizes=np.roll(q.group_sizes, 1))
        if fault in LOWER and spec.scaling == "mxfp8":
            q = with_lower_scales(x, q, given, fault)
        if fault == "empty-shift" and given is not None and spec.scaling in ("current", "delayed"):
            packed = np.zeros_like(q.rowwise_scale if q.rowwise_scale is not None else q.columnwise_scale)
            for name in ("rowwise_scale", "columnwise_scale"):
                scale = getattr(q, name)
                if scale is not None:
                    packed = np.concatenate([scale[given > 0], scale[given == 0]])
                    q = replace(q, **{name: packed})
        if fault == "no-saturation" and spec.scaling == "delayed" and spec.format == "e4m3" and q.rowwise is not None:
            bytes_ = q.rowwise.view(np.uint8).copy()
            bytes_[(bytes_ & 0x7F) == 0x7E] |= 0x01
            q = replace(q, rowwise=bytes_.view(q.rowwise.dtype))
        if (
            fault == "wrong-column-scale"
            and q.columnwise_scale is not None
            and spec.scaling == "block"
            and not spec.square
        ):
            q = replace(q, columnwise_scale=np.ascontiguousarray(q.columnwise_scale[:, ::-1]))
        return q

    def dequantize(self, request: Request, q: QuantizedArray, direction: Direction = "rowwise") -> Any:
        """The definition."""
        return octavo_numerics.dequantize(
            q, "rowwise" if self.fault == "one-plane" and q.rowwise is not None else direction
        )

    def adamw_step(self, request: Request, arrays: Any, how: Any, out: Any = None) -> None:
        """The definition's, in place."""
        step_in_place(self.fault, arrays, how, out)

    # GEMMs

    def _values(self, q: Any, direction: Direction) -> Any:
        if isinstance(q, Multiplied) and direction in q.values:
            return q.values[direction]
        if not isinstance(q, QuantizedArray):
            values = q.astype(np.float32)
            return _tf32(values) if self.fault == "tf32" else values
        if q.group_sizes is not None:
            q = replace(q, group_sizes=clamp(q.group_sizes, q.spec.shape[0]))
        if self.fault in OF_OTHER_BLOCKS:
            q = with_scales_of_other_blocks(q, direction, self.fault)
        return octavo_numerics.dequantize(q, direction)

    def _plan(self, sizes: Any, rows: int) -> tuple[Any, Any]:
        if self.fault == "syncs":
            sizes.tolist()
        counts = clamp(sizes, rows)
        return counts, np.concatenate([[0], np.cumsum(counts)])

    def _product(self, a: Any, b: Any) -> Any:
        if self.fault == "varies" and self._calls % 2:
            half = a.shape[1] // 2
            return a[:, half:] @ b[:, half:].T + a[:, :half] @ b[:, :half].T
        return sums_of_14_bits(a, b) if self.fault == "unpromoted" else a @ b.T

    def _result(self, values: Any, request: Request, out: Any) -> Any:
        if self.fault == "swallows-nan":
            values = np.nan_to_num(values)
        if self.fault == "truncates" and request.out_dtype == "bfloat16":
            values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        with np.errstate(over="ignore"):
            result = values.astype(DTYPES[request.out_dtype])
        if self.fault == "clamps" and request.out_dtype == "float16":
            result = np.where(np.isinf(result), np.copysign(_LARGEST_FP16, result), result)
        if out is None or self.fault == "returns-alone":
            return result
        out[...] = result
        write_around(self.fault, out)
        return out

    def _by_rows(self, request: Request, rows: Any, matrices: Any, sizes: Any, start: Any) -> Any:
        counts, bounds = self._plan(sizes, len(rows))
        out = np.zeros((len(rows), matrices.shape[1]), dtype=np.float32) if start is None else start
        for group in np.flatnonzero(counts):
            span = slice(bounds[group], bounds[group + 1])
            out[span] = self._product(rows[span], matrices[group])
            if self.fault == "sees-batch" and counts[group] > 64:
                out[span] *= np.float32(1 + 2**-8)
            if self.fault == "stale-tile" and counts[group] >= 16 and out.shape[1] >= 16:
                out[bounds[group] : bounds[group] + 8, :8] = out[bounds[group] + 8 : bounds[group] + 16, :8]
        if self.fault == "drops-tail":
            out[bounds[-1] :] = 1.0
        if self.fault == "leaks-tail" or self.fault == "reads-payload-tail":
            out[bounds[-1] :] += 0 * rows[bounds[-1] :, :1]
        return out

    def fprop(
        self,
        request: Request,
        x: Any,
        w: Any,
        sizes: Any,
        *,
        bias: Any = None,
        bias_scales: Any = None,
        out: Any = None,
    ) -> Any:
        """y = x w^T + s b."""
        rows = _raw(x) if self.fault == "reads-payload-tail" else self._values(x, "rowwise")
        matrices = self._values(w, "rowwise")
        if request.weight == "kn":
            matrices = self._values(w, "rowwise" if self.fault == "other-plane" else "columnwise").transpose(0, 2, 1)
        y = self._by_rows(request, rows, matrices, sizes, self._start(out))
        if bias is not None and self.fault != "no-bias":
            counts, bounds = self._plan(sizes, len(rows))
            for group in np.flatnonzero(counts):
                span = slice(bounds[group], bounds[group + 1])
                scale = 1 if bias_scales is None or self.fault == "no-scales" else np.asarray(bias_scales)[span, None]
                y[span] += scale * bias[group].astype(np.float32)
        return self._result(y, request, out)

    def dgrad(self, request: Request, dy: Any, w: Any, sizes: Any, *, out: Any = None) -> Any:
        """dx = dy w."""
        turned = request.weight == "kn"
        matrices = self._values(w, "rowwise") if turned else self._values(w, "columnwise").transpose(0, 2, 1)
        return self._result(
            self._by_rows(request, self._values(dy, "rowwise"), matrices, sizes, self._start(out)), request, out
        )

    def wgrad(self, request: Request, x: Any, dy: Any, sizes: Any, *, out: Any = None, accumulate: bool = False) -> Any:
        """dw = dy^T x of each group."""
        a, b = self._values(dy, "columnwise"), self._values(x, "columnwise")
        counts, _ = self._plan(sizes, x.spec.shape[0] if isinstance(x, QuantizedArray) else len(x))
        if isinstance(x, QuantizedArray) and x.spec.quantizer.hadamard:
            counts = -(-counts // 16) * 16
        bounds = np.concatenate([[0], np.cumsum(counts)])
        dw = np.zeros((len(counts), a.shape[1], b.shape[1]), dtype=np.float32)
        for group in np.flatnonzero(counts):
            span = slice(bounds[group], bounds[group + 1])
            dw[group] = self._product(a[span].T, b[span].T)
        if request.weight == "kn":
            dw = dw.transpose(0, 2, 1)
        if self.fault == "empty-dw":
            dw[counts == 0] = 1e-3
        if self.fault == "needs-rows" and not len(b):
            dw += 1
        lost = self.fault == "no-accumulate" or (self.fault == "adds-fp32" and request.out_dtype != "float32")
        if accumulate and not lost:
            dw = np.where((counts > 0)[:, None, None], dw + out.astype(np.float32), out.astype(np.float32))
        return self._result(dw, request, out)

    def _start(self, out: Any) -> Any:
        return out.astype(np.float32) if out is not None and self.fault == "uses-out" else None


def _as_int32(value: Any) -> Any:
    """Sizes of 64 bits as a kernel reads them that takes their bytes for sizes of 32."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        return np.ascontiguousarray(value).view(np.int32)[: len(value)]
    return value


def _raw(q: Any) -> Any:
    """Dequantized rows with the unspecified ones as they are."""
    if not isinstance(q, QuantizedArray):
        return q.astype(np.float32)
    values = octavo_numerics.dequantize(q)
    total = int(np.asarray(q.group_sizes).sum())
    assert q.rowwise is not None
    if q.rowwise.dtype != np.uint8:
        values[total:] = q.rowwise[total:].astype(np.float32)
    return values


def _tf32(values: Any) -> Any:
    """Rounded to ten bits of a significand, as tensor cores read fp32 that nobody told them to keep."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
