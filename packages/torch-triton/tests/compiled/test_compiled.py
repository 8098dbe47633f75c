"""Kernels compile for chips that are not here, into those chips' own products, within their registers and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

Facts = list[dict[str, Any]]

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may have: CUDA's programming guide, "Technical Specifications"."""
REGISTERS = 65536
MOST_SPILLED = 256
"""Bytes of a thread on the stack: a few registers around a loop, not an accumulator."""
MOST_SPILLED_IN_GLUON = 64
"""There a loop has 192 sums and little beside them: 184 bytes took 45 % of wgrad's speed on an H200."""
PRODUCTS = {
    (80, "fp8-block"): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    (89, "fp8-block"): "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    (90, "fp8-block"): "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    (100, "fp8-block"): "tcgen05.mma.cta_group::1.kind::f8f6f4",
    (100, "mxfp8"): "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    # a scale per 16 codes has two names in PTX, and Triton 3.7 writes the other one than 3.9
    (100, "nvfp4"): (
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",
    ),
    (120, "fp8-block"): "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}


def _compile(which: str, folder: Path) -> Facts:
    """In a process in which Triton compiles, with nothing in its cache."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "kernels.py"), which]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables | {"TRITON_CACHE_DIR": str(folder)}
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _hold_to_limits(facts: Facts) -> None:
    for each in facts:
        what = f"{each['kernel']} of {each['recipe']} for sm_{each['chip']}"
        assert each["shared"] <= SHARED[each["chip"]], f"{what} has {each['shared']} bytes of shared memory"
        assert each["registers"] * each["warps"] * 32 <= REGISTERS, f"{what} has {each['registers']} registers"
        most = MOST_SPILLED_IN_GLUON if each["kernel"].startswith(("hopper", "undivided")) else MOST_SPILLED
        assert each["spilled"] <= most, f"{what} spills {each['spilled']} bytes"
        if each["product"] is None:
            assert not each["inexact"], f"{what} contracts, flushes or approximates: {each['inexact']}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """A product on each chip, those of MXFP8 and NVFP4 on the one that has them, two of wgrad on Hopper, three
    quantizers, moved rows."""
    return _compile("quick", tmp_path_factory.mktemp("cache"))


def test_limits_are_kept(quick: Facts) -> None:
    """Shared memory, registers, spills; and quantizers and moved rows, whose bits the interpreter has checked, round as
    written: no contraction, no flushed subnormals, no approximate division."""
    assert {each["chip"] for each in quick} == set(SHARED)
    others = {"quantize_blocks", "quantize_units", "permute_rows", "combine_rows", "dot_rows"}
    assert {each["kernel"] for each in quick if each["product"] is None} == others
    _hold_to_limits(quick)


def test_stages_are_released_by_all_warps(quick: Facts) -> None:
    """One thread of some warps says that all of them have read a stage: it has to wait for the others first."""
    in_gluon = [each for each in quick if each["kernel"].startswith(("hopper", "undivided"))]
    assert in_gluon
    for each in in_gluon:
        assert set(each["releases"]) == {"barrier"}, f"{each['kernel']} of {each['recipe']}: {each['releases']}"


@pytest.mark.parametrize(("chip", "recipe"), list(PRODUCTS))
def test_products_are_the_chips_own(chip: int, recipe: str, quick: Facts) -> None:
    """The instruction that the table of the guide names: an emulation by Triton would compile as well."""
    mine = [each for each in quick if (each["chip"], each["recipe"]) == (chip, recipe) and each["product"]]
    assert mine
    for each in mine:
        assert any(name.startswith(PRODUCTS[chip, recipe]) for name in each["products"]), each


def _multiply_fp32_whole(facts: Facts) -> None:
    own = [each for each in facts if each["recipe"] == "fp32"]
    assert {each["product"] for each in own} == {"float32"}
    for each in own:
        assert not [name for name in each["products"] if "tf32" in name], f"{each['kernel']} for sm_{each['chip']}"


def test_fp32_is_no_tf32(quick: Facts) -> None:
    """Operands in fp32 are multiplied in fp32 by all three GEMMs, and by wgrad into an accumulator: by descriptors it
    once rounded them to TF32's ten bits on Hopper and Blackwell, as Triton does unless it is told not to."""
    assert len([each for each in quick if each["recipe"] == "fp32"]) == 4
    _multiply_fp32_whole(quick)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_chip(tmp_path: Path) -> None:
    """All recipes, all operations, moved rows in each dtype, all five chips."""
    facts = _compile("all", tmp_path)
    assert {(each["chip"], each["recipe"]) for each in facts} >= set(product(SHARED, ("nvfp4", "fp32", "moves")))
    _hold_to_limits(facts)
    _multiply_fp32_whole(facts)
