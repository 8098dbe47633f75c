"""What CUDA's quantizers sum beside the codes: norm statistics, dbias and dprobs, within the errors of their orders.

Skipped where there is no device.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native
from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import CUDA, EDGE_SIZES, Shape, address, new_plane, quantizer  # noqa: E402  it imports torch
from quantize_call import run_quantizer  # noqa: E402

pytestmark = needs_device


def run_on_device(
    shape: Shape, x: Any, dtype: str, cols: int, scaling: str = "mxfp8", **arguments: int | float
) -> None:
    """Quantize rows of `x` on the device, for an output that is among `arguments`."""
    made_by = quantizer({"scaling": scaling, "format": "e4m3"})
    plane = new_plane({"scaling": scaling, "format": "e4m3"}, shape, "rowwise", layouts.PLAIN, CUDA)
    sides = {"cuda": True, "dtype": native.DTYPES[dtype], "cols": cols, **shape.arguments}
    kinds = {name: arguments[name] for name in ("prologue", "activation", "norm") if name in arguments}
    sums = {name: name in arguments for name in ("dbias", "dprobs")}
    # workspace_bytes is told nothing of addresses: a prologue's result is kept in it where they are not aligned
    size = made_by.workspace_bytes(**sides, **kinds, rowwise=True, columnwise=False, **sums) + x.nbytes + 256
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    run_quantizer(
        made_by,
        **sides,
        **arguments,
        x=address(x),
        row_stride=x.stride(0),
        row_codes=address(plane.codes),
        row_scales=address(plane.scales),
        plan=address(shape.plan(CUDA)),
        stream=torch.cuda.current_stream().cuda_stream,
        workspace=address(workspace),
        workspace_bytes=size,
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("cols", [64, 2040, 2048, 7168, 7172])
def test_norm_statistics_are_near_those_of_float64(rng: np.random.Generator, cols: int, norm: str, dtype: str) -> None:
    """Within the error of the sums' order: strands of C / (8 * 32) elements, then 8 strands and 256 threads pairwise.

    Each addition costs 2^-24 of the sum of magnitudes at most; a deviation and its square cost two more, the division
    by C, epsilon, root and reciprocal half an ulp each. A long row has eight times as many strands, hence less.
    """
    shape = Shape(tuple(int(size) for size in rng.choice(EDGE_SIZES, 5)), cols)
    values = rng.standard_normal((shape.rows, cols)) * np.exp2(rng.integers(-6, 6, (shape.rows, 1))) + rng.normal()
    x = torch.from_numpy(values).to(getattr(torch, dtype)).cuda()
    exact = x.double().cpu().numpy()[: shape.used]
    x[shape.used :] = torch.nan
    gamma = torch.ones(cols, dtype=x.dtype, device="cuda")
    mean, rstd = (torch.full((shape.rows,), -7.0, device="cuda") for _ in range(2))
    epsilon = 1e-5
    arguments: dict[str, Any] = {"prologue": native.PROLOGUES["norm"], "norm": native.NORMS[norm], "epsilon": epsilon}
    if norm == "layer":
        arguments["mean"] = mean.data_ptr()
    run_on_device(shape, x, dtype, cols, **arguments, gamma=gamma.data_ptr(), rstd=rstd.data_ptr())

    steps = cols / (8 * 32) + 12
    got_mean, got_rstd = (value.cpu().numpy()[: shape.used].astype(np.float64) for value in (mean, rstd))
    center = exact.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((shape.used, 1))
    want = 1 / np.sqrt(((exact - center) ** 2).mean(axis=1) + np.float64(np.float32(epsilon)))
    assert (np.abs(got_rstd / want - 1) <= ((steps + 4) / 2 + 2) * 2.0**-24).all()
    if norm == "layer":
        allowed = (steps + 1) * 2.0**-24 * np.abs(exact).mean(axis=1)
        assert (np.abs(got_mean - center[:, 0]) <= allowed).all()
        assert (mean[shape.used :] == -7).all()
    assert (rstd[shape.used :] == -7).all()


@pytest.mark.parametrize("stacked", [False, True])
def test_dbias_of_small_integers_is_exact(rng: np.random.Generator, stacked: bool) -> None:
    """Sums below 2^24 have one answer in any order; groups without rows have 0, tails do not count (faults.md 12)."""
    for cols in (1, 16, 130, 520):
        if stacked:
            shape = Shape((300,) * 3, cols, matrix_rows=300)
        else:
            shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 4)), 9000, 0), cols)
        x = torch.from_numpy(rng.integers(-100, 100, (shape.rows, cols)).astype(np.float32)).cuda()
        x[shape.used :] = torch.nan
        groups = len(shape.sizes)
        out = torch.full((groups, cols), torch.nan, device="cuda")
        run_on_device(shape, x, "float32", cols, dbias=out.data_ptr())
        ends = np.cumsum([0, *shape.real])
        rows = x.double().cpu().numpy()
        want = np.stack([rows[a:b].sum(axis=0) for a, b in itertools.pairwise(ends)])
        assert (out.double().cpu().numpy() == want).all()


def test_dbias_has_the_same_bits_each_time(rng: np.random.Generator) -> None:
    """A fixed order of additions: nothing depends on which CTA is first (faults.md 22, 30)."""
    shape = Shape((700, 0, 129, 5000), 264)
    x = torch.from_numpy(rng.standard_normal((shape.rows, 264)).astype(np.float32)).to(torch.bfloat16).cuda()
    results = []
    for _ in range(20):
        out = torch.full((len(shape.sizes), 264), torch.nan, device="cuda")
        run_on_device(shape, x, "bfloat16", 264, dbias=out.data_ptr())
        results.append(out.cpu().numpy().view(np.uint32))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("scaling", ["mxfp8", "row"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "relu2", "clamped_swiglu"])
def test_gradients_of_probabilities(rng: np.random.Generator, name: str, dtype: str, scaling: str) -> None:
    """dprobs [M] is the sum of dy act(x) (* up) along rows, 0 past the last group, where rows hold NaN, with one set of
    bits, made beside the codes or the amaxes (row scaling) or, where rows are not aligned, on its own (faults.md 1, 3,
    22)."""
    gated = name in native.GATED
    kinds = {"prologue": native.PROLOGUES["activation_grad"], "activation": native.ACTIVATIONS[name]}
    for features in (32, 160, 416, 1056):
        cols = features * (1 + gated)
        shape = Shape((130, 0, 7, 300), cols)
        x, dy = (
            torch.from_numpy(rng.standard_normal((shape.rows, n)).astype(np.float32) * 2) for n in (cols, features)
        )
        x, dy = (array.to(getattr(torch, dtype)).cuda() for array in (x, dy))
        x[shape.used :], dy[shape.used :] = torch.nan, torch.nan
        results = []
        for start in (0, 1):
            apart = torch.empty(x.numel() + start, dtype=x.dtype, device="cuda")[start:].view_as(x).copy_(x)
            out = torch.full((shape.rows,), torch.nan, device="cuda")
            given = {"dy": dy.data_ptr(), "dy_stride": features, "dprobs": out.data_ptr(), **kinds}
            run_on_device(shape, apart, dtype, cols, scaling, **given)
            results.append(out.cpu().numpy())
        assert (results[0].view(np.uint32) == results[1].view(np.uint32)).all()
        wide, used = x.double().cpu()[: shape.used], slice(shape.used)
        gate, up = wide[:, :features], wide[:, features:]
        if name == "clamped_swiglu":
            gate, up = gate.clamp(max=7), (up.clamp(-7, 7).float() + 1).double()
        value = {
            "swiglu": torch.nn.functional.silu(gate),
            "geglu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
            "relu2": gate.clamp(min=0) ** 2,
            "clamped_swiglu": gate * torch.sigmoid(1.702 * gate),
        }[name]
        terms = (value * (up if gated else 1) * dy.double().cpu()[used]).numpy()
        # 6 ulp of the activation, two products, and the additions of a row
        allowed = np.abs(terms).sum(1) * 2.0**-24 * (14 + 8 + features / 128)
        assert (np.abs(results[0][used] - terms.sum(1)) <= allowed).all()
        assert not results[0][shape.used :].any()
