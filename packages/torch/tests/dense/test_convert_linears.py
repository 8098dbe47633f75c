"""convert_linears: torch's linear layers give their places and parameters to Linear, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import octavo
from octavo_torch import GroupedLinear, Linear, convert, convert_linears

K = 32
BACKEND = "torch-reference"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(K, 2 * K), nn.Linear(2 * K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o_proj(self.q_proj(x).relu())
        return y


class Model(nn.Module):
    """Layers with attention and experts, an embedding, and a head that shares its weight."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, K)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"self_attn": Attention(), "experts": GroupedLinear(2, K, K, recipe=None, backend=BACKEND)})
            for _ in range(layers)
        )
        self.head = nn.Linear(K, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["self_attn"](x)  # type: ignore[index]
        y: Tensor = self.head(x)
        return y


PROJECTIONS = "layers.*.self_attn.*_proj"


def converted(recipe: octavo.Recipe | str | None, filter: Any = PROJECTIONS, **options: Any) -> Model:
    model = Model()
    convert_linears(model, recipe, filter, backend=BACKEND, **options)
    return model


def test_parameters_stay_the_same_objects(rng: np.random.Generator) -> None:
    """An optimizer made before steps them, a checkpoint fits both ways, and the bits are those of Linear's own."""
    model = Model().bfloat16().eval()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.layers[0].self_attn.q_proj._is_initialized = True  # type: ignore[union-attr]
    names = convert_linears(model, "fp8-block", PROJECTIONS, backend=BACKEND)
    assert names == tuple(f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qo")
    assert all(value is before[name] for name, value in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight
    layer = model.get_submodule(names[0])
    assert isinstance(layer, Linear)
    assert not layer.training
    assert layer._is_initialized
    twin = Linear(K, 2 * K, dtype=torch.bfloat16, recipe=octavo.BlockScaling(), backend=BACKEND)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, K, dtype=torch.bfloat16)
    assert torch.equal(layer(x), twin(x))
    old = layer.weight.detach().clone()
    model(torch.randint(5, (2, 6))).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, old)


def test_a_shared_module_and_shared_weights_stay_shared(rng: np.random.Generator) -> None:
    """A module with two names is one module under both, and two modules with one weight keep one weight."""
    shared, first, second = nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K)
    second.weight = first.weight
    model = nn.ModuleDict({"a": shared, "b": shared, "c": first, "d": second})
    assert convert_linears(model, "mxfp8", "[!a]", backend=BACKEND) == ("b", "c", "d")
    assert isinstance(model["a"], Linear)
    assert model["a"] is model["b"]
    assert model["c"] is not model["d"]
    assert model["c"].weight is model["d"].weight is first.weight


def test_a_recipe_brings_its_state(rng: np.random.Generator) -> None:
    """Buffers on the weights' device, as before the first step; `seed` is each layer's, and without it they differ."""
    delayed = converted(octavo.DelayedScaling(history=4))
    layer = delayed.layers[1].self_attn.q_proj  # type: ignore[union-attr]
    assert isinstance(layer, Linear)
    assert layer.amax_history.shape == (3, 4, 1)
    assert layer.amax_history.device == layer.weight.device
    assert bool((layer.encode_scale == 1).all())
    given, drawn = (converted("nvfp4", "*.q_proj", seed=seed) for seed in (7, None))
    assert [int(value) for name, value in given.named_buffers() if name.endswith("seed_base")] == [7, 7]
    assert len({int(value) for name, value in drawn.named_buffers() if name.endswith("seed_base")}) == 2
    meta = nn.Sequential(nn.Linear(K, K, device="meta"))
    convert_linears(meta, "nvfp4", "0", backend=BACKEND)
    assert all(value.is_meta for value in meta.state_dict().values())


def test_convert_takes_it_from_there(rng: np.random.Generator) -> None:
    """The recipe of all layers that have one is changed in one call; torch's own stay torch's."""
    model = converted("fp8-block", lambda name, module: name.startswith("layers.0") and module.bias is not None)
    names = convert(model, "mxfp8", backend=BACKEND)
    assert names == ("layers.0.self_attn.q_proj", "layers.0.experts", "layers.1.experts")
    assert all(model.get_submodule(name).recipe == octavo.MXFP8() for name in names)
    assert type(model.layers[1].self_attn.q_proj) is nn.Linear  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"by convert_linears"):
        convert(nn.Sequential(nn.Linear(K, K)), "mxfp8")


# ---- what is refused


def one(change: Callable[[nn.Linear], object] = lambda linear: None) -> Callable[[], nn.Module]:
    """A model of one linear layer, to which something was done."""

    def made() -> nn.Module:
        linear = nn.Linear(K, K)
        change(linear)
        return nn.ModuleDict({"q": linear})

    return made


def own_forward(linear: nn.Linear) -> None:
    linear.forward = lambda x: x  # type: ignore[method-assign]


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(K, 2, K)


MODELS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no module": (lambda: 3, "*", r"model is 3; give a torch\.nn\.Module"),
    "no match": (one(), "x*", "filter matches none of the model's Linear modules; give names among q"),
    "none there": (lambda: nn.ReLU(), "*", r"model has no torch\.nn\.Linear; give one that has"),
    "itself": (lambda: nn.Linear(K, K), "*", "model is the Linear itself, so there is no module in which"),
    "no filter": (one(), None, "filter is None; give a pattern of names, a function of name and module$"),  # type: ignore[dict-item]
    "ours": (
        lambda: nn.Sequential(Linear(K, K, recipe=None)), "0",
        r"0 is an octavo_torch\.Linear already; octavo_torch\.convert gives it another recipe",
    ),
    "subclass": (lambda: nn.MultiheadAttention(K, 2), "out_proj", "NonDynamicallyQuantizableLinear, which may compute"),
    "parametrization": (one(weight_norm), "q", "q has a parametrization, which would be lost; remove it"),
    "hook": (
        one(lambda linear: linear.register_forward_hook(lambda *_: None)), "q", "q has _forward_hooks, which would be"
    ),
    "hook of state dicts": (
        one(lambda linear: linear.register_state_dict_post_hook(lambda *_: None)), "q", "q has _state_dict_hooks"
    ),
    "forward": (one(own_forward), "q", "the forward of q was replaced or compiled, which would be lost"),
    "compiled": (one(lambda linear: linear.compile(backend="eager")), "q", "the forward of q was replaced or compiled"),
    "buffer": (
        one(lambda linear: linear.register_buffer("scale", torch.ones(1))), "q", "q holds other things than a weight"
    ),
    "features": (
        lambda: nn.Sequential(nn.Linear(K, 24)), "0", "0 has out_features=24, and kernels on GPUs take multiples of 16"
    ),
    "dtype": (one(lambda linear: linear.double()), "q", "weight of q has dtype float64; Linear takes bfloat16"),
    "reads weights": (transformer, "linear1", r"linear1 belongs to a torch\.nn\.TransformerEncoderLayer"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_what_would_be_lost_is_refused(case: str) -> None:
    """In a sentence about the module, before anything has changed."""
    make, filter, sentence = MODELS[case]
    model = make()
    before = list(model.modules()) if isinstance(model, nn.Module) else []
    with pytest.raises(ValueError, match=sentence):
        convert_linears(model, "mxfp8", filter)
    if isinstance(model, nn.Module):
        assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_nothing_changes_where_one_is_refused() -> None:
    """A filter that also selects the head, whose 5 out-features no kernel takes; and options that do not fit."""
    model = Model()
    with pytest.raises(ValueError, match="head has out_features=5"):
        convert_linears(model, "mxfp8", "*")
    for options, sentence in (
        ({"seed": "x"}, "seed is 'x'"),
        ({"backend": 3}, "backend is 3"),
        ({"recipe": 5}, "recipe is 5; give a Recipe or the name of one"),
    ):
        with pytest.raises(ValueError, match=sentence):
            convert_linears(model, **{"recipe": None, "filter": PROJECTIONS, **options})
    assert not any(isinstance(module, Linear) for module in model.modules())
