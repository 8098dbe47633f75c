"""Equality with the golden vectors, byte for byte, where their folder stands beside the checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_numerics import dequantize, init_delayed, plane_sizes, quantize, record_amax, update_delayed, valid

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "golden"
STEMS = (
    "denormal_f32",
    "gauss_bf16",
    "huge_f32",
    "nonfinite_f32",
    "outliers_bf16",
    "rowscaled_f32",
    "scale_boundaries_f32",
    "ties_e2m1_bf16",
    "ties_e4m3fn_bf16",
    "tiny_f32",
    "wide_exponents_bf16",
    "zeros_bf16",
)
SCALINGS = {"tensor": "current", "block128": "block", "mx": "mxfp8"}

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the golden vectors are not beside this checkout; test_vectors.py verifies a clone"
)


def parse(key: str) -> tuple[QuantizerSpec, Direction, dict[str, str]]:
    """`KIND.FORMAT.pow2=P.DIRECTION...` as a spec, a direction and the key's own arguments."""
    words = re.split(r"\.(?![0-9])", key)
    fields = dict(word.split("=") for word in words if "=" in word)
    formats = [word.removesuffix("fn") for word in words if word in ("e4m3fn", "e5m2")]
    direction: Any = "columnwise" if {"columnwise", "column"} & set(words) else "rowwise"
    content: dict[str, Any] = {
        "format": formats[0] if formats else "e2m1",
        "scaling": SCALINGS.get(words[0], words[0]),
        "orientation": direction,
        "square": "square" in words,
        "rounding": "stochastic" if "stochastic" in words else "nearest",
        "power_of_two": fields.get("pow2") == "1",
        "amax_epsilon": float(fields.get("eps", "0")),
        "hadamard": "hadamard" in words,
    }
    return QuantizerSpec(**content), direction, fields


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.size == right.size and left.tobytes() == right.tobytes()


def test_no_golden_file_is_left_out() -> None:
    """The folder holds the files that are tested here, and delayed scaling's."""
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted([*STEMS, "delayed_scaling"])


@pytest.mark.parametrize("stem", STEMS)
def test_every_golden_vector_is_met(stem: str) -> None:
    """Codes, scales, second level and dequantized values of every recipe, direction and option."""
    with np.load(FOLDER / f"{stem}.npz", allow_pickle=False) as archive:
        file = {name: archive[name] for name in archive.files}
    x, sizes = file["x_bits"].view(np.float32), file["group_sizes"]
    assert np.isnan(x[sizes.sum() :]).all()
    keys = sorted({name.partition("|")[0] for name in file if "|" in name})
    assert len(keys) >= 29
    for key in keys:
        spec, direction, fields = parse(key)
        q = quantize(
            x,
            spec,
            sizes,
            seed=int(file["sr_seed"]),
            operand=("x", "w", "dy")[int(fields.get("operand", "0"))],
            group_offset=int(fields.get("group_offset", "0")),
            scale=file["delayed_scale"] if spec.scaling == "delayed" else None,
        )
        planes = valid(q)
        rows = plane_sizes(q, direction)
        scales = file[f"{key}|scales"]
        scales = scales[: sizes.sum()] if len(scales) == len(x) else scales
        assert same(planes[direction], file[f"{key}|codes"]), key
        assert same(planes[f"{direction}_scale"], scales), key
        if f"{key}|padded_sizes" in file:
            assert rows.tolist() == file[f"{key}|padded_sizes"].tolist(), key
        if f"{key}|global" in file:
            assert same(np.repeat(planes[f"{direction}_global"], rows), file[f"{key}|global"]), key
        if f"{key}|dequant_bits" in file:
            values = dequantize(q, direction)
            assert same(values[: rows.sum()], file[f"{key}|dequant_bits"]), key
            assert not values[rows.sum() :].view(np.uint32).any(), key


@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_follows_its_golden_history(algorithm: Any, margin: int) -> None:
    """History and scale after each of 40 steps, steps without tokens, an Inf and a subnormal among them."""
    with np.load(FOLDER / "delayed_scaling.npz", allow_pickle=False) as file:
        state = init_delayed(file["amax"].shape[1], 8)
        for step, amax in enumerate(file["amax"]):
            state = update_delayed(record_amax(state, amax), "e4m3", algorithm=algorithm, margin=margin)
            assert same(state.scale, file[f"{algorithm}.margin={margin}|scale"][step]), step
            assert same(state.history, file[f"{algorithm}.margin={margin}|history"][step]), step
