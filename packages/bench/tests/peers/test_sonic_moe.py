"""SonicMoE beside our MoE layer, by a stand-in: what it is given, its gradients, and what is said without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sonic_stand_in import sonic_modules

from octavo_bench.errors import AbsentError
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.shapes import Shape
from octavo_bench.moe.benchmark import ADDED, GATHERED, PEERS, SONIC, TORCHS
from octavo_bench.moe.peers import in_our_order, own_calls, sonic_calls
from octavo_bench.peers.loading import loaded_sonic_moe
from octavo_bench.training.moe import draw_layer

ADAPTER = "octavo_bench.peers.sonic_moe"
MOE = ["bench", "moe", "--device", "cpu", "--backend", "torch-reference", "--kinds", "bf16", "--repeats", "2"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter is imported anew, and forgotten with the stand-ins that it has found."""
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    yield
    sys.modules.pop(ADAPTER, None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stand-ins in the packages' place."""
    modules = sonic_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return dict(modules)


def _absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("quack", "quack.autotuner"):
        monkeypatch.setitem(sys.modules, name, None)


def test_it_is_given_the_same_layer(seed: int, library: dict[str, Any]) -> None:
    """Its gradients of tokens, router and weights are torch's, w1's in our order of gates and ups."""
    layer = draw_layer(TorchEngine("cpu"), Shape("tiny", 4, 48, 80, 128), 2, seed)
    expected = own_calls(layer, GATHERED)[0]()
    gradients = in_our_order(SONIC, sonic_calls(layer)[0]())
    for theirs, own, leaf in zip(gradients, expected, layer.sets[0].leaves, strict=True):
        assert theirs.shape == leaf.shape
        assert torch.linalg.vector_norm((theirs - own).float()) <= 2.0**-4 * torch.linalg.vector_norm(own.float())


def test_its_order_of_rows_and_ours_are_inverse(seed: int, library: dict[str, Any]) -> None:
    """Gates first and then ups, as gate, up, gate, up."""
    sonic, _ = loaded_sonic_moe()
    w1 = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(seed))
    alternating = sonic.interleaved(w1)
    assert torch.equal(alternating[:, ::2], w1[:, :4])
    assert torch.equal(alternating[:, 1::2], w1[:, 4:])
    assert alternating.is_contiguous()
    assert torch.equal(sonic.separated(alternating), w1)


def test_it_is_tuned_over_few_configurations(library: dict[str, Any]) -> None:
    """Of hundreds that take hours to compile; the line says which."""
    gemms = library["quack.gemm_interface"]
    before = len(gemms.gemm_tuned.configs)
    sonic, tuned = loaded_sonic_moe()
    assert before > 100
    for name in ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"):
        offered = [each.kwargs["config"] for each in getattr(gemms, name).configs]
        assert {(one.tile_m, one.tile_n, one.pingpong) for one in offered} == sonic.TILES
        assert len(offered) == len(sonic.TILES)
        assert not any(one.swap_ab or one.device_capacity != 9 or one.cluster_m != 2 for one in offered)
    sums = library["sonicmoe.functional.reduction_over_k_gather"].token_gather_sum_kernel
    assert len(sums.configs) == len(sonic.SUMS)
    assert "in clusters 2 x 1" in tuned


def test_a_package_that_is_absent_or_refuses_says_so(library: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of its chain may refuse to load, or have moved what limits its tuners."""
    del library["quack.gemm_interface"].gemm_dgated_tuned
    with pytest.raises(AbsentError, match="SonicMoE is not measured: its tuners cannot be limited: AttributeError"):
        loaded_sonic_moe()
    monkeypatch.delitem(sys.modules, ADAPTER)
    monkeypatch.delattr(library["sonicmoe.functional"], "_UpProjection")
    with pytest.raises(AbsentError, match="SonicMoE is not measured: it does not load: ImportError"):
        loaded_sonic_moe()
    _absent(monkeypatch)
    with pytest.raises(AbsentError, match="SonicMoE is not measured: it is not installed"):
        loaded_sonic_moe()


def test_it_has_a_row_and_a_column_where_it_is_installed(tmp_path: Path, run: Any, library: dict[str, Any]) -> None:
    """Its gradients compared with torch's before its time counts."""
    target = tmp_path / "moe.json"
    result = run(*MOE, "--output", str(target))
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    assert [row["kind"] for row in content["rows"]] == [*PEERS, "bf16"]
    assert [row["match"].startswith("within ") for row in content["rows"]] == [True, False, True, True]
    assert content["notes"] == []
    assert "SonicMoE / it" in result.out
    (line,) = [line for line in result.out.splitlines() if line.lstrip().startswith("bf16 ")]
    assert line.count("x ") >= 2


def test_a_run_without_it_says_why(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table as in JSON, once; torch's rows are there."""
    _absent(monkeypatch)
    result = run(*MOE)
    told = [line for line in result.out.splitlines() if "SonicMoE is not measured" in line]
    assert len(told) == 1
    assert told[0].startswith("note: SonicMoE is not measured: it is not installed")
    content = run(*MOE, "--json").json
    assert content["notes"] == [told[0].removeprefix("note: ")]
    assert {row["kind"] for row in content["rows"]} == {*TORCHS, "bf16"}
    assert "SonicMoE" not in run(*MOE, "--no-peers", "--json").out


def test_a_layer_whose_gradients_differ_has_no_time(
    run: Any, library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it would take gates for ups; the run goes on."""
    right = library["sonicmoe.functional"]._UpProjection.apply
    monkeypatch.setattr(
        library["sonicmoe.functional"]._UpProjection,
        "apply",
        lambda x, w1, *others: right(x, w1.flip(0).permute(2, 0, 1).contiguous().permute(1, 2, 0), *others),
    )
    result = run(*MOE, "--json")
    assert result.code == 0
    (note,) = result.json["notes"]
    assert note.startswith("SonicMoE's bf16: ValueError: its gradients differ from torch's by")
    assert {row["kind"] for row in result.json["rows"]} == {ADDED, GATHERED, "bf16"}
