"""Per-expert state dicts, as Hugging Face's checkpoints have them, stacked for GroupedMLP and taken apart again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo import BlockScaling
from octavo_torch import GroupedMLP, stack_experts, unstack_experts

G, K, F, N = 3, 16, 24, 20
SIZES = [5, 0, 9]
LAYOUTS = {
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "deepseek": ("model.layers.3.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "alone": ("experts", ("w1", "w3", "w2")),
}


class Expert(nn.Module):
    """One expert as a model of Hugging Face's format has it."""

    def __init__(self, names: tuple[str, ...], bias: bool) -> None:
        super().__init__()
        self.names = names
        for name in names[:-1]:
            self.add_module(name, nn.Linear(K, F, bias=bias))
        self.add_module(names[-1], nn.Linear(F, N, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        *inner, down = (getattr(self, name)(x) for name in self.names[:-1])
        hidden = nn.functional.silu(inner[0]) * down if inner else torch.relu(down) ** 2
        result: Tensor = getattr(self, self.names[-1])(hidden)
        return result


def of_experts(path: str, names: tuple[str, ...], bias: bool) -> tuple[nn.ModuleList, dict[str, Tensor]]:
    experts = nn.ModuleList(Expert(names, bias) for _ in range(G))
    return experts, {f"{path}.{name}": value for name, value in experts.state_dict().items()}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacked_experts_compute_what_the_modules_did(rng: np.random.Generator, layout: str, bias: bool) -> None:
    """The gate is the gate and the up projection the up projection: the outputs are those of the module list."""
    path, names = LAYOUTS[layout]
    experts, state = of_experts(path, names, bias)
    stacked = stack_experts(state | {"model.norm.weight": torch.ones(K)})
    assert stacked.pop("model.norm.weight").shape == (K,)
    mlp = GroupedMLP(G, K, F, N, bias=bias, backend="torch-reference")
    mlp.load_state_dict({key.removeprefix(f"{path}."): value for key, value in stacked.items()})

    x = torch.from_numpy(rng.standard_normal((sum(SIZES), K), dtype=np.float32))
    expected = torch.cat([expert(rows) for expert, rows in zip(experts, x.split(SIZES), strict=True)])
    torch.testing.assert_close(mlp(x, SIZES), expected)


def test_stacked_inside_of_autocast(rng: np.random.Generator) -> None:
    """For another dtype than the experts': torch's own stack and cat are refused there."""
    _, state = of_experts("experts", LAYOUTS["alone"][1], bias=True)
    state = {key: value.bfloat16() for key, value in state.items()}
    with torch.autocast("cpu", torch.float16):
        inside = stack_experts(state)
    outside = stack_experts(state)
    assert inside.keys() == outside.keys()
    for key, value in outside.items():
        assert inside[key].dtype is torch.bfloat16
        assert torch.equal(inside[key], value)


def test_experts_without_a_gate(rng: np.random.Generator) -> None:
    """Two projections make a weight1 [G, F, K]."""
    experts, state = of_experts("experts", ("up_proj", "down_proj"), bias=False)
    stacked = stack_experts(state)
    mlp = GroupedMLP(G, K, F, N, activation="relu2", backend="torch-reference")
    mlp.load_state_dict({key.removeprefix("experts."): value for key, value in stacked.items()})
    x = torch.from_numpy(rng.standard_normal((sum(SIZES), K), dtype=np.float32))
    expected = torch.cat([expert(rows) for expert, rows in zip(experts, x.split(SIZES), strict=True)])
    torch.testing.assert_close(mlp(x, SIZES), expected)


@pytest.mark.parametrize("per_group", [False, True], ids=["one parameter", "a parameter per group"])
@pytest.mark.parametrize("interleave", [None, 8])
def test_a_whole_model_loads_and_goes_back(interleave: int | None, per_group: bool) -> None:
    """Names of the other modules stay, and what is exported again is what was loaded, bit for bit."""
    path, names = LAYOUTS["mixtral"]
    _, state = of_experts(path, names, bias=False)
    block = nn.ModuleDict({"gate": nn.Linear(K, G, bias=False)})
    block["experts"] = GroupedMLP(
        G, K, F, N, recipe=BlockScaling(), interleave=interleave, per_group_parameters=per_group
    )
    model = nn.ModuleDict(
        {"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"block_sparse_moe": block})])})}
    )
    router = "model.layers.0.block_sparse_moe.gate.weight"
    state[router] = torch.randn(G, K)
    model.load_state_dict(stack_experts(state, interleave=interleave))
    if per_group:
        return  # its own state dict has a key per expert already
    back = unstack_experts(model.state_dict(), names, interleave=interleave)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert len({back[key].untyped_storage().data_ptr() for key in back}) == len(
        back
    )  # safetensors takes no shared memory


def test_a_rank_takes_its_own_experts() -> None:
    """With experts spread over ranks each stacks its own, and writes them under the model's numbers."""
    _, state = of_experts("experts", ("w1", "w3", "w2"), bias=False)
    own = stack_experts(state, experts=range(1, 3))
    assert torch.equal(own["experts.weight2"][0], state["experts.1.w2.weight"])
    back = unstack_experts(own, ("w1", "w3", "w2"), first=1)
    assert set(back) == {key for key in state if not key.startswith("experts.0.")}
    assert all(torch.equal(back[key], state[key]) for key in back)


def test_tensors_are_read_list_by_list() -> None:
    """A mapping over a file on disk gives one layer's experts at a time, in the order of its keys."""

    class Lazy(Mapping[str, Tensor]):
        def __init__(self, values: dict[str, Tensor]) -> None:
            self.values_, self.read = values, list[str]()

        def __getitem__(self, key: str) -> Tensor:
            self.read.append(key)
            return self.values_[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.values_)

        def __len__(self) -> int:
            return len(self.values_)

    state = of_experts("layers.0.experts", ("w1", "w3", "w2"), bias=False)[1]
    state |= of_experts("layers.1.experts", ("w1", "w3", "w2"), bias=False)[1]
    lazy = Lazy(state)
    stack_experts(lazy)
    layers = [key.split(".")[1] for key in lazy.read]
    assert layers == sorted(layers)
    assert sorted(lazy.read) == sorted(state)


def changed(remove: str | None = None, **more: Tensor) -> dict[str, Tensor]:
    state = of_experts("experts", ("w1", "w3", "w2"), bias=False)[1]
    if remove is not None:
        state = {key: value for key, value in state.items() if not key.startswith(remove)}
    return state | {key.replace("__", "."): value for key, value in more.items()}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model.norm.weight": torch.ones(2)}, r"state_dict has no experts; give one with keys such as"),
        (changed("experts.1."), r"experts has 2 experts, up to number 2, and not 1; give the state dict of all"),
        (changed("experts.1.w3"), r"experts\.1 has no w3\.weight, which other experts have"),
        (changed("experts.0.w3"), r"experts of experts have weights w1, w2; known names are"),
        (changed(experts__2__w3__weight=torch.ones(F, K + 1)), r"experts\.2\.w3\.weight has shape \[24, 17\]"),
        (changed(experts__2__w2__weight=torch.ones(N, F + 1)), r"have float32 \[20, 24\] and float32 \[20, 25\]"),
        (changed(experts__0__w1__weight_scale_inv=torch.ones(1)), r"'experts\.0\.w1\.weight_scale_inv'; .*dequantize"),
        (
            changed(experts__0__w1__weight=torch.ones(F, K).to(torch.float8_e4m3fn)),
            r"experts\.0\.w1\.weight is float8_e4m3fn \[24, 16\], quantized; dequantize it first",
        ),
    ],
    ids=["none", "gap", "projection missing", "names", "shape", "down's shape", "scales", "codes"],
)
def test_what_cannot_be_stacked_is_named(state: dict[str, Tensor], message: str) -> None:
    """A sentence names the key, what it has, and what is needed."""
    with pytest.raises(ValueError, match=message):
        stack_experts(state)
