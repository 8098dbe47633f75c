"""The card: torch-native's kernels where a graph may hold them, first for graph-safe requests and for no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import octavo_native
import octavo_registry
import octavo_torch_native.plugin
from octavo import PRESETS, NoBackendError, QuantizerSpec, Recipe
from octavo.recipe_base import GEMMS, Gemm
from octavo_registry.contract.cards import Capability
from octavo_registry.contract.gemm import BoundWgrad
from octavo_registry.contract.request import Request
from octavo_registry.dispatch.match import match
from octavo_torch import grouped_linear, quantize
from octavo_torch.compiler import graphs
from octavo_torch_cudagraph import graph_safe, plugin
from octavo_torch_cudagraph.backend import CudaGraphBackend
from octavo_torch_cudagraph.sizes import device_plan
from octavo_torch_native.arrays.group_index import GroupIndex
from octavo_torch_native.backend import NativeBackend

MXFP8 = PRESETS["mxfp8"]
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")


def gemm(op: Gemm, recipe: Recipe, **fields: Any) -> Request:
    base: dict[str, Any] = {
        "op": op,
        "framework": "torch",
        "device": "cuda",
        "arch": (9, 0),
        "in_dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "recipe": recipe.for_gemm(op),
        "k": 64,
        "n": 32,
        "groups": 3,
    }
    return Request(**(base | fields))


def test_the_card_imports_neither_torch_nor_the_kernels() -> None:
    """Discovery reads every card (architecture.md); public names are there all the same."""
    code = (
        "import sys, octavo_torch_cudagraph.plugin as plugin;"
        "print(plugin.CARD.name, *(name in sys.modules for name in ('torch', 'octavo_native._native', 'numpy')));"
        "import octavo_torch_cudagraph as g; print(all(callable(getattr(g, name)) for name in g.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch-cudagraph", "False", "False", "False", "True"]


def test_every_row_may_be_captured() -> None:
    """Device sizes on a GPU alone, and the kernels, dtypes and sums of torch-native."""
    record = next(record for record in octavo_registry.backends() if record.name == plugin.NAME)
    assert record.card == plugin.CARD
    assert record.verdict is None, record.reason
    for row in plugin.CARD.capabilities:
        assert row in octavo_torch_native.plugin.CARD.capabilities
        assert (row.graph_safe, row.device, row.sizes) == (True, "cuda", frozenset({"device"}))


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_every_recipe_is_served(op: Gemm, recipe: Recipe) -> None:
    """All recipes are graph-safe on Hopper."""
    assert isinstance(match(plugin.CARD, gemm(op, recipe, graph_safe=True)), Capability)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (gemm("fprop", MXFP8, sizes="host"), "sizes are on the host (a list); it takes them as a device array"),
        (gemm("fprop", MXFP8, device="cpu", arch=None), "serves cuda, the device is cpu"),
        (gemm("fprop", MXFP8, arch=(8, 0)), "needs sm_90, this device is sm_80"),
        (gemm("fprop", PRESETS["bf16"], in_dtype="float32"), "takes bfloat16, float16, the input is float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_card_refuses(asked: Request, reason: str) -> None:
    """With what was given and what to do, graph-safe or not."""
    assert match(plugin.CARD, asked) == reason


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels and a device were there."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_what_the_native_backend_refuses_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are the same, and so are their limits."""
    refuses = CudaGraphBackend().refuses
    assert refuses(gemm("fprop", MXFP8)) is None
    assert "k is 40, and its cuda GEMMs take multiples of 16" in (refuses(gemm("fprop", MXFP8, k=40)) or "")
    monkeypatch.setattr(octavo_native, "HAS_CUDA", False)
    assert "without CUDA kernels; install" in (refuses(gemm("fprop", MXFP8)) or "")


def test_a_first_call_inside_a_capture_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of bad sizes would be made, and cleared, by each replay."""
    monkeypatch.setattr("octavo_torch_cudagraph.backend.is_capturing", lambda: True)
    monkeypatch.setattr("octavo_torch.compiler.status.is_capturing", lambda: True)
    monkeypatch.setattr("octavo_torch.compiler.status._words", {})
    sentence = CudaGraphBackend().refuses(gemm("fprop", MXFP8)) or ""
    assert "run the function once before the capture" in sentence
    word = {torch.device("cuda", 0): torch.zeros(1, dtype=torch.int32)}
    monkeypatch.setattr("octavo_torch.compiler.status._words", word)
    assert CudaGraphBackend().refuses(gemm("fprop", MXFP8)) is None


def test_host_sizes_never_reach_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is called by hand refuses them, too; prepared ones go through."""
    bound = CudaGraphBackend().bind(gemm("fprop", PRESETS["bf16"], device="cpu", arch=None))
    assert bound.prepare is device_plan
    x, w, sizes = torch.randn(8, 64), torch.randn(3, 32, 64), torch.tensor([2, 0, 5])
    with pytest.raises(ValueError, match="take nothing from the host; give a tensor on"):
        bound.run(x, w, sizes)
    with pytest.raises(ValueError, match="group_sizes is on the CPU"):
        bound.prepare(sizes, 8, x)
    plan = octavo_registry.plan(gemm("fprop", PRESETS["bf16"], device="cpu", arch=None), backend="torch-native")
    rows: GroupIndex = plan.prepare(sizes, 8, x)  # type: ignore[misc]
    assert torch.equal(bound.run(x, w, rows), plan.run(x, w, sizes))


def test_host_sizes_never_reach_a_gradient_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the native backend answers for gate and up rows that take turns is a plan like any other."""
    called: list[str] = []

    def function(name: str) -> Callable[..., None]:
        return lambda x, dy, sizes, /: called.append(name)

    def interleaved(block: int) -> BoundWgrad[Any, Any] | None:
        return BoundWgrad(function("run"), limited=lambda most: function(f"on {most}")) if block == 1 else None  # type: ignore[arg-type]

    native = BoundWgrad(function("halves"), interleaved=interleaved)  # type: ignore[arg-type]
    monkeypatch.setattr(NativeBackend, "bind", lambda self, request: native)
    bound: Any = CudaGraphBackend().bind(gemm("wgrad", PRESETS["bf16"], device="cpu", arch=None))
    assert bound.interleaved(2) is None
    answer = bound.interleaved(1)
    for run in (answer.run, answer.limited(16)):
        with pytest.raises(ValueError, match="take nothing from the host"):
            run(torch.randn(8, 64), torch.randn(8, 32), torch.tensor([2, 0, 5]))
        run(torch.randn(8, 64), torch.randn(8, 32), None)
    assert called == ["run", "on 16"]


@pytest.mark.parametrize(
    ("op", "fields", "operands"),
    [
        ("quantize", {}, 1),
        ("act_quantize", {"activation": "silu"}, 1),
        ("dact_quantize", {"activation": "silu"}, 2),
        ("norm_quantize", {"norm": "rms"}, 2),
    ],
)
def test_host_sizes_never_reach_a_quantizer(op: Any, fields: dict[str, Any], operands: int) -> None:
    """Fused or not; the same function takes sizes that were prepared."""
    asked = gemm("fprop", MXFP8, device="cpu", arch=None)
    where: dict[str, Any] = {"framework": "torch", "device": "cpu", "in_dtype": "bfloat16", "out_dtype": "bfloat16"}
    bound = CudaGraphBackend().bind(Request(op=op, quantizer=SPEC, k=64, groups=3, **where, **fields))
    x, sizes = torch.randn(8, 64), torch.tensor([2, 0, 5])
    given = [x] * operands if op != "norm_quantize" else [x, torch.ones(64), None]
    with pytest.raises(ValueError, match="group_sizes is on the CPU"):
        bound.run(*given, sizes)
    with pytest.raises(ValueError, match="group_sizes is on the CPU"):
        bound.run(*given, group_sizes=sizes)
    plan = octavo_registry.plan(asked, backend="torch-native")
    bound.run(*given, plan.prepare(sizes, 8, x))  # type: ignore[misc]


def test_graph_safe_asks_for_plans_that_may_be_captured() -> None:
    """On a CPU there are none: the error has every backend's reason, and calls outside of the block work."""
    x, w = torch.randn(8, 16), torch.randn(2, 4, 16)
    with graph_safe():
        assert graphs.wants_graph(x)
        with pytest.raises(NoBackendError, match=r"torch-cudagraph +refused +serves cuda, the device is cpu"):
            grouped_linear(x, w, [3, 5], recipe=MXFP8)
        with pytest.raises(NoBackendError, match="graph_safe=True was asked for and its quantize in mxfp8 is not"):
            quantize(x, SPEC)
    assert not graphs.wants_graph(x)
    assert grouped_linear(x, w, [3, 5], recipe=MXFP8).shape == (8, 4)


def test_a_closed_preference_is_a_graph_safe_plan() -> None:
    """Named alone it serves device sizes; host sizes are refused with what to do, and nobody steps in."""
    x, w = torch.randn(8, 16), torch.randn(2, 4, 16)
    with pytest.raises(NoBackendError, match="the preference is closed and names torch-cudagraph"):
        grouped_linear(x, w, [3, 5], recipe=MXFP8, backend="torch-cudagraph")


def test_kernels_are_those_of_the_native_backend() -> None:
    """`octavo why --kernels --backend torch-cudagraph`."""
    choices = CudaGraphBackend().kernels(gemm("fprop", MXFP8, k=7168, n=2048, groups=32), 16384)
    assert choices[0].chosen
