"""octavo_torch.adapters.megatron: its recorded interface, and inside megatron-core where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo
from octavo_torch import GroupedLinear, add_lora
from octavo_torch.adapters.megatron import ExpertLinear, builders

INSTALLED = find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(
    not INSTALLED, reason="megatron-core is not installed; `nox -s adapters` installs it"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

G, K, N, M = 3, 32, 48, 24
SIZES = [9, 0, 12]
RECIPE = octavo.MXFP8()
REFERENCE = "torch-reference"


@pytest.fixture
def backend(backend: str | None) -> str | None:
    """As for the other adapters; layers that are made on a GPU draw their weights from Megatron's stream."""
    if backend is None:
        pytest.importorskip("megatron", reason="megatron-core is not installed; `nox -s adapters` installs it")
    return backend


class Ranks:
    """A process group, as far as an adapter asks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def on_a_cpu() -> bool:
    """As `backend` has it."""
    return torch.get_default_device().type == "cpu"


def groups(**changes: Ranks) -> Any:
    return SimpleNamespace(**({"ep": Ranks(), "expt_tp": Ranks(), "expt_dp": Ranks()} | changes))


def config(**changes: Any) -> Any:
    """What the adapter reads of a TransformerConfig."""
    plain = {
        "fp8": None, "fp4": None, "use_cpu_initialization": on_a_cpu(), "init_model_with_meta_device": False,
        "params_dtype": torch.bfloat16, "gradient_accumulation_fusion": False, "delay_wgrad_compute": False,
        "perform_initialization": True, "expert_model_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def build(
    which: int = 0,
    *,
    recipe: Any = RECIPE,
    bias: bool = False,
    skip: bool = False,
    backend: str | None = REFERENCE,
    **changes: Any,
) -> Any:
    """fc1 (0) or fc2 (1), as TEGroupedMLP builds them; `pg_collection` among the changes."""
    collection = changes.pop("pg_collection", groups())
    return builders(recipe, backend=backend, seed=1)[which](
        G, K, N, config=config(**changes), init_method=torch.nn.init.ones_, bias=bias, skip_bias_add=skip,
        is_expert=True, tp_comm_buffer_name="fc1", pg_collection=collection,
    )  # fmt: skip


def plain(layer: Any, recipe: Any = RECIPE, *, bias: bool = False, backend: str | None = REFERENCE) -> GroupedLinear:
    """The same weights in one parameter."""
    twin = GroupedLinear(G, K, N, bias=bias, recipe=recipe, dtype=torch.bfloat16, backend=backend, seed=1)
    twin.load_state_dict(layer.state_dict(), strict=False)
    return twin


def draw(layer: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(M, N).bfloat16()


@pytest.mark.parametrize("made", [list, torch.tensor], ids=["list", "tensor"])
def test_the_recorded_call(made: Any, backend: str | None, rng: np.random.Generator) -> None:
    """Positional sides, a list of counts or a tensor, (y, None) or the biases that Megatron adds; `weight{i}` keys."""
    sizes, layer = made(SIZES), build(bias=True, backend=backend)
    assert list(layer.state_dict()) == [*(f"weight{i}" for i in range(G)), *(f"bias{i}" for i in range(G))]
    assert bool((layer.weight1 == 1).all())
    assert not layer.bias2.any()
    x, dy = draw(layer)
    y, biases = layer(x, sizes)
    assert biases is None
    twin = plain(layer, bias=True, backend=backend)
    expected = twin(x, SIZES)
    assert torch.equal(y, expected)
    ours = torch.autograd.grad(y, (x, layer.weight0, layer.weight2, layer.bias0), dy)
    theirs = torch.autograd.grad(expected, (x, twin.weight, twin.bias), dy)
    for one, other in zip(ours, (theirs[0], theirs[1][0], theirs[1][2], theirs[2][0]), strict=True):
        assert torch.equal(one, other)
    left = build(bias=True, skip=True, backend=backend)
    left.load_state_dict(layer.state_dict())
    y, biases = left(x, sizes)
    assert torch.equal(y, plain(left, backend=backend)(x, SIZES))
    assert biases == [left.bias0, left.bias1, left.bias2]


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_gradients_go_into_main_grad(delay: bool, backend: str | None, rng: np.random.Generator) -> None:
    """fp32 buffers of the distributed optimizer, added to, with their flag; by backward_dw where wgrad is delayed."""
    layer = build(gradient_accumulation_fusion=True, delay_wgrad_compute=delay, backend=backend)
    x, dy = draw(layer)
    weights = [getattr(layer, f"weight{i}") for i in range(G)]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, 2.0)
        weight.grad_added_to_main_grad = False
    layer(x, SIZES)[0].backward(dy)
    if delay:
        assert all(bool((weight.main_grad == 2).all()) for weight in weights)
    layer.backward_dw()
    twin = plain(layer, backend=backend)
    twin.main_grad = "accumulate"
    twin.weight.main_grad = torch.full(twin.weight.shape, 2.0)
    twin(x, SIZES).backward(dy)
    for index, weight in enumerate(weights):
        assert torch.equal(weight.main_grad, twin.weight.main_grad[index])
        assert weight.grad_added_to_main_grad


def test_what_does_not_fit() -> None:
    """Megatron's own fp8 would pad; a side that the ranks do not divide is named; both when the layer is built."""
    with pytest.raises(ValueError, match=r"config\.fp8 'e4m3' and config\.fp4 None; build experts"):
        build(fp8="e4m3")
    five = groups(expt_tp=Ranks(0, 5))
    with pytest.raises(ValueError, match="output_size is 48 and expt_tp has 5 ranks; give a multiple"):
        build(pg_collection=five)
    with pytest.raises(ValueError, match="input_size is 32 and expt_tp has 5 ranks"):
        build(1, pg_collection=five)
    two = groups(expt_tp=Ranks(0, 2))
    assert build(pg_collection=two).weight0.shape == (N // 2, K)
    assert build(1, pg_collection=two).weight0.shape == (N, K // 2)
    assert not build(expert_model_parallel_size=2).weight0.allreduce


def test_delayed_scaling_keeps_its_state(backend: str | None) -> None:
    """In buffers of the module, which its state dict has; nothing is pickled (faults.md 51)."""
    layer = build(recipe=octavo.DelayedScaling(history=4), backend=backend)
    x, dy = draw(layer)
    layer(x, SIZES)[0].backward(dy)
    layer.update_scales()
    assert layer.encode_scale.unique().numel() > 1
    again = build(recipe=octavo.DelayedScaling(history=4), backend=backend)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x, SIZES)[0], layer(x, SIZES)[0])


def experts(recipe: Any, *, bias: bool, backend: str | None) -> Any:
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig(
        num_layers=1, hidden_size=K, num_attention_heads=2, num_moe_experts=G, moe_ffn_hidden_size=N,
        ffn_hidden_size=N, add_bias_linear=bias, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=on_a_cpu(), params_dtype=torch.float32, bias_activation_fusion=False,
    )  # fmt: skip
    fc1, fc2 = builders(recipe, backend=backend, seed=1)
    return TEGroupedMLP(G, made, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2), groups())


@needs_megatron
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_inside_megatron(bias: bool, backend: str | None, rng: np.random.Generator) -> None:
    """TEGroupedMLP on our layers, without TransformerEngine: values and gradients of a loop over experts."""
    module = experts(None, bias=bias, backend=backend)
    assert isinstance(module.linear_fc2, ExpertLinear)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    rows = sum(SIZES)
    x, probs = torch.randn(rows, K).requires_grad_(), torch.rand(rows).requires_grad_()
    y, left = module(x, torch.tensor(SIZES), probs)
    assert left is None
    pieces = []
    for expert, (part, share) in enumerate(zip(x.split(SIZES), probs.split(SIZES), strict=True)):
        one, two = ({k: getattr(fc, f"{k}{expert}", None) for k in ("weight", "bias")} for fc in (
            module.linear_fc1, module.linear_fc2))  # fmt: skip
        gate, up = torch.nn.functional.linear(part, one["weight"], one["bias"]).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up * share[:, None]
        piece = inner @ two["weight"].T
        pieces.append(piece if two["bias"] is None else piece + two["bias"] * share[:, None])
    dy = torch.randn(rows, K)
    leaves = (x, probs, *module.parameters())
    ours = torch.autograd.grad(y, leaves, dy)
    theirs = torch.autograd.grad(torch.cat(pieces), leaves, dy)
    for a, b in zip((y, *ours), (torch.cat(pieces), *theirs), strict=True):
        assert torch.linalg.vector_norm(a - b) <= 2.0**-12 * torch.linalg.vector_norm(b)
    module.backward_dw()  # nothing is left out
    quantized = experts(RECIPE, bias=bias, backend=backend)
    quantized.load_state_dict(module.state_dict())
    low = quantized(x, torch.tensor(SIZES), probs)[0]
    assert 0 < torch.linalg.vector_norm(low - y) <= 2.0**-2 * torch.linalg.vector_norm(y)


def test_adapters_have_no_keys_in_distributed_checkpoints() -> None:
    """A layer with adapters is refused with what to do, and not by a number that no parameter's name ends in."""
    layer = build()
    add_lora(layer, 2)
    with pytest.raises(ValueError, match=r"the layer experts\.linear has adapters \(lora\).* save the adapters' own"):
        layer.sharded_state_dict("experts.linear.")


@needs_megatron
def test_keys_of_distributed_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert in its place among all of them, sides of tensor parallelism split, the recipe's state beside them."""
    # without torch.distributed Megatron takes every group for one of one rank
    for name in ("rank", "size"):
        monkeypatch.setattr(f"megatron.core.utils.get_pg_{name}", lambda group, name=name: getattr(group, name)())
    collection = groups(ep=Ranks(1, 2), expt_tp=Ranks(0, 2), expt_dp=Ranks(3, 4))
    recipe = octavo.DelayedScaling(history=4)
    for which, local in ((0, (N // 2, K)), (1, (N, K // 2))):
        layer = build(which, recipe=recipe, bias=True, pg_collection=collection)
        made = layer.sharded_state_dict("experts.linear.", (), {"dp_cp_group": Ranks()})
        weight = made["experts.linear.weight1"]
        assert weight.key == "experts.linear.weight"
        assert weight.local_shape[-2:] == local
        assert weight.global_shape == (2 * G, N, K)
        assert weight.global_offset[0] == G + 1
        assert weight.replica_id[2] == 3
        assert made["experts.linear.bias0"].global_shape == (2 * G, N)
        history = made["experts.linear.amax_history"]
        assert (history.global_shape, history.global_offset) == ((3, 4, 2 * G), (0, 0, G))
        single = layer.sharded_state_dict(
            "experts.linear.", (), {"dp_cp_group": Ranks(), "singleton_local_shards": True}
        )
        assert single["experts.linear.weight0"].key == f"{G}.experts.linear.weight"
