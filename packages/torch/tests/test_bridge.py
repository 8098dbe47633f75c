"""BRIDGE: bits cross unchanged, public functions answer, waiting operations are noticed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo_registry
import octavo_torch
from octavo import MXFP8, DelayedScaling
from octavo_torch.bridge import BRIDGE

TYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "uint8", "int32", "int64")


@pytest.mark.parametrize("name", TYPES)
def test_bits_cross_unchanged(name: str, rng: np.random.Generator) -> None:
    """numpy to torch and back, for every plane's dtype."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = rng.integers(0, 256, 24 * dtype.itemsize, dtype=np.uint8).view(dtype).reshape(4, 6)
    back = BRIDGE.to_numpy(BRIDGE.from_numpy(array))
    assert back.dtype == dtype
    assert back.tobytes() == array.tobytes()


def test_entry_points() -> None:
    """The registry finds the bridge and the backend by their names."""
    assert octavo_registry.framework("torch") is BRIDGE
    record = next(record for record in octavo_registry.backends() if record.name == "torch-reference")
    assert record.card is not None
    assert record.card.priority == -100
    assert BRIDGE.version() == torch.__version__
    assert BRIDGE.devices()[0].kind == "cpu"


def test_the_card_imports_no_framework() -> None:
    """octavo_torch.plugin in a fresh interpreter; public names are there all the same."""
    import subprocess
    import sys

    code = "import sys, octavo_torch.plugin as plugin; print(plugin.CARD.name, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch-reference", "False"]
    assert all(getattr(octavo_torch, name) for name in octavo_torch.__all__)


def test_grouped_linear_with_gradients(rng: np.random.Generator) -> None:
    """y, dx, dw, db; delayed scales by operand; tensors of the caller keep no gradient."""
    x, w, b, dy = torch.randn(8, 16), torch.randn(2, 4, 16), torch.randn(2, 4), torch.randn(8, 4)
    result = BRIDGE.grouped_linear(x, w, [4, 4], dy, recipe=MXFP8(), bias=b)
    assert [tuple(value.shape) for value in (result.y, result.dx, result.dw, result.db)] == [
        (8, 4),
        (8, 16),
        (2, 4, 16),
        (2, 4),
    ]
    assert not x.requires_grad
    recipe = DelayedScaling(history=2)
    scaled = BRIDGE.grouped_linear(x, w, [4, 4], recipe=recipe, scales={"x": torch.tensor([2.0, 3.0])})
    plain = BRIDGE.grouped_linear(x, w, [4, 4], recipe=recipe)
    assert not torch.equal(scaled.y, plain.y)


class LooksBack(torch.autograd.Function):
    """The identity, whose backward reads its gradient."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, dy: torch.Tensor) -> torch.Tensor:
        dy.tolist()
        return dy


def test_host_reads_are_named() -> None:
    """Reads by method, by operator, in a backward, and inside Octavo's own operators."""
    x, sizes = torch.randn(8, 16), torch.tensor([4, 4])
    assert list(BRIDGE.host_reads(lambda x: x * 2 + x.sum(), x)) == []
    assert "Tensor.item" in BRIDGE.host_reads(lambda x: x.sum().item(), x)
    assert "Tensor.tolist" in BRIDGE.host_reads(lambda s: s.tolist(), sizes)
    assert any("mask" in name for name in BRIDGE.host_reads(lambda x: x[x > 0], x))
    assert "aten::nonzero" in BRIDGE.host_reads(lambda x: x.nonzero(), x)
    assert "Tensor.__bool__" in BRIDGE.host_reads(lambda x: bool((x > 0).any()), x)
    for backward in (lambda y, x: y.backward(), torch.autograd.grad):
        assert "Tensor.tolist" in BRIDGE.host_reads(
            lambda x, go=backward: go(LooksBack.apply(x).sum(), x), x.clone().requires_grad_()
        )
    inside = BRIDGE.host_reads(lambda x, s: torch.ops.octavo_torch.bound_sizes(s, 8, x), x, sizes)
    assert "Tensor.tolist" in inside


def test_grouped_tensor_from_planes() -> None:
    """A stranger's planes become a GroupedTensor with int64 sizes on their device."""
    q = BRIDGE.quantize(torch.randn(8, 32), MXFP8().quantizer("x"), [4, 4])  # type: ignore[arg-type]
    planes = {name: getattr(q, name) for name in octavo_registry.PLANES}
    again = BRIDGE.grouped_tensor(q.spec, np.array([4, 4], np.int32), planes)
    assert again.group_sizes is not None
    assert again.group_sizes.dtype is torch.int64
    assert again.rowwise is q.rowwise
