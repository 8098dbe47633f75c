"""The peers of GEMMs do the same products, so that their time is that of the same work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.shapes import MODELS, Shape
from octavo_bench.harness.timing import Times
from octavo_bench.peers.cublas import batched_call, batches, parts
from octavo_bench.peers.of_gemms import dense_peers
from octavo_bench.peers.peer import Peer, beside, peers_of
from octavo_bench.peers.scaled_mm import scaled_batched_call

GROUPS, ROWS, N, K = 3, 96, 48, 32


@pytest.fixture
def operands(seed: int) -> dict[str, torch.Tensor]:
    """x, w and dy of three equal groups in bf16: small integers, whose sums are exact in bf16 and in any order."""
    draw = torch.Generator().manual_seed(seed)
    sides = {"x": (ROWS, K), "w": (GROUPS, N, K), "dy": (ROWS, N)}
    return {name: torch.randint(-2, 3, side, generator=draw).to(torch.bfloat16) for name, side in sides.items()}


def _group(operands: dict[str, torch.Tensor], gemm: Gemm, group: int) -> torch.Tensor:
    """The product of one group in fp32."""
    rows = slice(group * ROWS // GROUPS, (group + 1) * ROWS // GROUPS)
    x, w, dy = operands["x"][rows].float(), operands["w"][group].float(), operands["dy"][rows].float()
    return {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}[gemm]


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_batch_is_the_grouped_gemm_with_a_weight_matrix_per_group(
    gemm: Gemm, operands: dict[str, torch.Tensor]
) -> None:
    """Unlike one dense product, whose weight matrix stays in the cache, it reads G of them."""
    result = batched_call(operands, gemm)()
    for group in range(GROUPS):
        assert torch.equal(result[group].float(), _group(operands, gemm, group))
    left, right = batches(operands, gemm)
    shape = Shape("tiny", GROUPS, K, N, ROWS)
    assert 2 * len(left) * left.shape[1] * left.shape[2] * right.shape[2] == shape.flops


def test_a_batch_needs_equal_parts() -> None:
    """Rows that the groups do not divide are a note in the file, not another number of FLOPs."""
    with pytest.raises(ValueError, match="equal parts; 97 rows are not a multiple of 3"):
        parts(torch.zeros(97, 4), 3)


@pytest.mark.parametrize("gemm", GEMMS)
def test_the_fp8_batch_multiplies_each_groups_codes(
    gemm: Gemm, operands: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product per group, the left operand by rows and the right one by columns, as cuBLAS takes them."""
    products: list[torch.Tensor] = []

    def scaled_mm(left: torch.Tensor, right: torch.Tensor, **options: Any) -> None:
        assert (left.stride(1), right.stride(0)) == (1, 1)
        assert left.dtype is right.dtype is torch.float8_e4m3fn
        assert options["use_fast_accum"] is False
        products.append(left.float() @ right.float())

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    scaled_batched_call(operands, gemm, fast=False)()
    codes = {name: value.to(torch.float8_e4m3fn).float() for name, value in operands.items()}
    assert len(products) == GROUPS
    for group, product in enumerate(products):
        assert torch.equal(product, _group(codes, gemm, group))


def test_batches_are_timed_for_each_gemm_and_stand_beside_all_sizes() -> None:
    """Equal parts of the same rows: the figure of even groups is what ragged ones are held to, too."""
    engine = cast(Any, SimpleNamespace(framework="torch", device="cuda"))
    names = [(one.name, one.sizes, one.gemm) for one in dense_peers(engine, cast(Any, None), ("fprop", "wgrad"))]
    assert names == [
        ("dense bf16", "dense", "dense"),
        ("dense fp8 fast", "dense", "dense"),
        ("dense fp8 exact", "dense", "dense"),
        *(
            (f"dense {kind}, batched", "dense", gemm)
            for gemm in ("fprop", "wgrad")
            for kind in ("bf16", "fp8 fast", "fp8 exact")
        ),
    ]
    times = Times(100.0, 100.0, 100.0)
    peers = [Peer(name, MODELS[1], sizes, gemm, times) for name, sizes, gemm in names]
    for sizes in ("even", "skewed"):
        assert list(beside(peers, GemmCase("bf16", "wgrad"), sizes)) == ["dense bf16, batched", "dense bf16"]
        assert list(beside(peers, GemmCase("bf16", "dgrad"), sizes)) == ["dense bf16"]
    assert peers_of(GemmCase("row", "fprop", fast=True))[:3] == (
        "scaled_grouped_mm fast",
        "dense fp8 fast, batched",
        "dense fp8 fast",
    )
    assert list(dense_peers(cast(Any, SimpleNamespace(framework="jax", device="cuda")), cast(Any, None), GEMMS)) == []
