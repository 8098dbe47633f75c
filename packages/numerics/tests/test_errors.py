"""Bad arguments: one line that names the argument, its value and what to give instead."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from octavo import QuantizerSpec
from octavo_numerics import (
    QuantizedArray,
    RouterRule,
    choose_experts,
    dequantize,
    grouped_dgrad,
    grouped_matmul,
    grouped_wgrad,
    quantize,
    valid,
)

MX = QuantizerSpec(format="e4m3", scaling="mxfp8")
DELAYED = QuantizerSpec(format="e4m3", scaling="delayed")
SR = QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic")
NVFP4 = QuantizerSpec(format="e2m1", scaling="nvfp4", hadamard=True, orientation="rowwise")
X = np.ones((4, 8), dtype=np.float32)
W = np.ones((2, 4, 8), dtype=np.float32)


def changed(q: QuantizedArray, **planes: Any) -> QuantizedArray:
    names = ("spec", "group_sizes", "rowwise", "rowwise_scale", "rowwise_global")
    return QuantizedArray(**{name: planes.get(name, getattr(q, name)) for name in names})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(X.astype(np.float64), MX), "x has dtype float64; cast it to bfloat16, float16 or float32"),
        (lambda: quantize([[1, 2]], MX), "x has dtype int64; cast it"),
        (lambda: quantize(X[0], MX), "x has shape [8]; give ragged rows [M, K] or stacked matrices [G, N, K]"),
        (lambda: quantize(X, MX, [5]), "group_sizes sum to 5 and the tensor has 4 rows"),
        (lambda: quantize(X, MX, [2, -1]), "group_sizes[1] is -1; sizes are zero or more"),
        (lambda: quantize(X, MX, [2**62, 2**62]), "group_sizes sum to 9223372036854775808 and the tensor has 4 rows"),
        (lambda: quantize(X, MX, [1.0, 2.0]), "group_sizes has dtype float64; give integers (int32 or int64)"),
        (lambda: quantize(X, MX, [True]), "group_sizes has dtype bool; give integers"),
        (lambda: quantize(X, MX, []), "group_sizes has shape [0]; give one size per group, [G] with G at least 1"),
        (lambda: quantize(X, MX, [[2]]), "group_sizes has shape [1, 1]; give one size per group"),
        (lambda: quantize(X, MX, 4), "group_sizes has shape []; give one size per group"),
        (lambda: quantize(W, MX, [4, 4]), "group_sizes was given with stacked matrices of shape [2, 4, 8]"),
        (lambda: quantize(W, NVFP4), "hadamard=True is defined for ragged [M, K] operands"),
        (lambda: quantize(X, SR), "seed is None and rounding is 'stochastic'; give an integer seed"),
        (lambda: quantize(X, SR, seed=1.5), "seed=1.5 is not an integer; give an integer (taken modulo 2^64)"),  # type: ignore[arg-type]
        (lambda: quantize(X, MX, operand="y"), "operand='y' is none of 'x', 'w', 'dy'"),  # type: ignore[arg-type]
        (lambda: quantize(X, MX, group_offset=-1), "group_offset=-1 with 1 groups is outside 0 to 2^32 - 1"),
        (lambda: quantize(X, MX, [2, 2], group_offset=2**32 - 1), "group_offset=4294967295 with 2 groups is outside"),
        (lambda: quantize(X, MX, group_offset=0.5), "group_offset=0.5 is not an integer"),  # type: ignore[arg-type]
        (lambda: quantize(X, DELAYED), "scale is None and scaling is 'delayed'; give the encode scales [G]"),
        (lambda: quantize(X, DELAYED, scale=np.ones((1, 1), dtype=np.float32)), "scale has shape [1, 1]; give one"),
        (lambda: quantize(X, DELAYED, scale=np.ones(1)), "scale has dtype float64; give float32 encode scales"),
        (lambda: quantize(X, DELAYED, scale=np.zeros(1, dtype=np.float32)), "scale[0] is 0.0; encode scales are"),
        (lambda: quantize(X, DELAYED, scale=np.full(1, np.nan, dtype=np.float32)), "scale[0] is nan; encode scales"),
        (lambda: quantize(X, MX, scale=np.ones(1, dtype=np.float32)), "scale was given, but scaling='mxfp8' computes"),
        (lambda: dequantize(quantize(X, MX), "row"), "direction='row' is neither 'rowwise' nor 'columnwise'"),  # type: ignore[arg-type]
        (lambda: dequantize(quantize(X, NVFP4), "columnwise"), "direction='columnwise' was not produced; this tensor"),
        (lambda: grouped_matmul(X[0], W, [4, 0]), "x has shape [8]; give [M, C]"),
        (lambda: grouped_matmul(X, W, [4]), "the number of group_sizes is 1 and the number of matrices in w is 2"),
        (lambda: grouped_matmul(X, W, [4, 1]), "group_sizes sum to 5 and the tensor has 4 rows"),
        (lambda: grouped_matmul(X[:, :7], W, [4, 0]), "x's last axis is 7 and w's last axis is 8"),
        (lambda: grouped_dgrad(X, W, [4, 0]), "dy's last axis is 8 and w's middle axis is 4"),
        (lambda: grouped_wgrad(X, X[:3], [3]), "dy's rows is 4 and x's rows is 3"),
        (lambda: choose_experts(X, RouterRule(9)), "k is 9 and a token has 8 of 8 experts to choose from"),
        (lambda: choose_experts(X, RouterRule(3, groups=4)), "k is 3 and a token has 2 of 8 experts to choose from"),
        (lambda: choose_experts(X, RouterRule(1, groups=3)), "groups is 3, kept_groups 1, and there are 8 experts"),
        (lambda: choose_experts(X, RouterRule(0)), "k is 0; give at least 1"),
        (lambda: choose_experts(X, RouterRule(1, "Softmax")), "score is 'Softmax'; give 'softmax', 'sigmoid'"),  # type: ignore[arg-type]
    ],
)
def test_the_error_is_one_line_with_the_cause(call: Any, message: str) -> None:
    """ValueError for every wrong rank, dtype, size, sum, seed, scale or name."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    if type(caught.value) is ValueError:
        assert "\n" not in str(caught.value)


def test_planes_that_do_not_fit_their_spec_are_refused() -> None:
    """Foreign arrays are checked before they are read."""
    q = quantize(X, NVFP4)
    assert q.rowwise is not None
    assert q.rowwise_scale is not None
    for planes, message in (
        ({"rowwise": q.rowwise[:3]}, r"rowwise has shape \[3, 8\]; its spec says \[4, 8\]"),
        ({"rowwise_scale": q.rowwise_scale.ravel()}, r"rowwise_scale has shape \[4\]; its spec says \[4, 1\]"),
        ({"rowwise_global": None}, r"rowwise_global is None; nvfp4 needs one second-level factor per group, \[1\]"),
        ({"group_sizes": np.array([5])}, "group_sizes sum to 5"),
        ({"spec": q.spec.model_copy(update={"rowwise_layout": "tiled"})}, "rowwise_layout='tiled' is a backend's own"),
    ):
        with pytest.raises(ValueError, match=message):
            valid(changed(q, **planes))


_FLUSHED = """
import ctypes, numpy as np
libm = ctypes.CDLL("libm.so.6")
environment = (ctypes.c_uint32 * 8)()
assert libm.fegetenv(environment) == 0
environment[7] |= 0x8040
assert libm.fesetenv(environment) == 0
import octavo, octavo_numerics
octavo_numerics.quantize(np.ones((1, 1), np.float32), octavo.recipe("mxfp8").quantizer("x"))
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="sets MXCSR's flush-to-zero bits through glibc's fesetenv on x86-64",
)
def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    """Wrong bits are never given in silence: some libraries set the processor's flush-to-zero mode for their caller."""
    done = subprocess.run([sys.executable, "-c", _FLUSHED], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: this thread flushes subnormal numbers to zero" in done.stderr
