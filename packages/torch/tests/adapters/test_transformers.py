"""octavo_torch.adapters.transformers: its recorded interface, and inside transformers where that is installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

import octavo
import octavo_torch.adapters.transformers as adapter
from octavo_torch import MoeShape, bytes_kept, grouped_mlp, moe_mlp, permute, unpermute
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.transformers import experts, register

T, H, INNER, E, CHOICES = 24, 32, 48, 4, 2
CLOSE = 2.0**-12
"""Of fp32 results that sum some hundreds of products in another order, relative to their norm."""


class Recorded(nn.Module):
    """An experts module as `use_experts_implementation` of transformers 5.17 to 5.23 leaves it."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.num_experts = E
        plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
        for name, value in ({"act_fn": nn.SiLU(), **plain} | facts).items():
            setattr(self, name, value)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        inner = 2 * INNER if self.has_gate else INNER
        for name, n, k in ((first, inner, H), ("down_proj", H, INNER)):
            shape = (E, k, n) if self.is_transposed else (E, n, k)
            setattr(self, name, nn.Parameter(torch.randn(shape) / k**0.5))
            if self.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, n)))

    def _default_apply_gate(self, value: Tensor) -> Tensor:
        gate, up = value.chunk(2, -1)
        return self.act_fn(gate) * up

    _apply_gate = _default_apply_gate

    def loop(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What it computes, choice by choice."""
        first = self.gate_up_proj if self.has_gate else self.up_proj
        y = torch.zeros_like(x)
        for token, choice in np.ndindex(*index.shape):
            expert = int(index[token, choice])
            if expert >= E:
                continue
            matrices = [one[expert].T if self.is_transposed else one[expert] for one in (first, self.down_proj)]
            h = matrices[0] @ x[token]
            if self.has_bias:
                h = h + (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)[expert]
            h = matrices[1] @ (self._apply_gate(h) if self.has_gate else self.act_fn(h))
            if self.has_bias:
                h = h + self.down_proj_bias[expert]
            if getattr(self, "has_post_expert_norm", False):
                h = self.post_expert_norm(h)
            y = y.index_add(0, torch.tensor([token]), (h * weights[token, choice])[None])
        return y


class Interleaved(Recorded):
    """A gate that nobody else has."""

    def _apply_gate(self, value: Tensor) -> Tensor:
        return silu(value[..., ::2]) * (value[..., 1::2] + 1)


class GptOssExperts(Recorded):
    """Named as the class of transformers, with its gate; biases reach past the limit on both sides."""

    def __init__(self, limit: float = 7.0, **facts: Any) -> None:
        super().__init__(has_bias=True, is_transposed=True, is_concatenated=False, **facts)
        self.alpha, self.limit = 1.702, limit
        with torch.no_grad():
            self.gate_up_proj_bias.mul_(6)

    def _apply_gate(self, value: Tensor) -> Tensor:
        gate = value[..., ::2].clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (value[..., 1::2].clamp(-self.limit, self.limit) + 1)


class OtherGate(GptOssExperts):
    """A subclass that computes something else."""

    def _apply_gate(self, value: Tensor) -> Tensor:
        return silu(value[..., ::2]) * value[..., 1::2]


class Relu2(nn.Module):
    """Named as the class of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


Relu2.__name__ = "ReLUSquaredActivation"


def choices(rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts of which some are elsewhere, weights."""
    index = torch.tensor(np.stack([rng.permutation(E + 1)[:CHOICES] for _ in range(T)]))
    return torch.randn(T, H).requires_grad_(), index, torch.rand(T, CHOICES).requires_grad_()


def gradients(function: Any, module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    x, index, weights = given
    y = function(x, index, weights)
    leaves = [x, weights, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape))]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm(a - b) <= CLOSE * torch.linalg.vector_norm(b)


MODULES: dict[str, Any] = {
    "gated": lambda: Recorded(),
    "biases": lambda: Recorded(has_bias=True),
    "turned": lambda: Recorded(is_transposed=True),
    "no gate": lambda: Recorded(has_gate=False, act_fn=Relu2()),
    "unknown activation": lambda: Recorded(act_fn=lambda x: gelu(x) * 2),
    "gpt-oss": lambda: GptOssExperts(),
    "another limit": lambda: GptOssExperts(limit=5.0),
    "another gate": lambda: OtherGate(),
    "a gate of its own": lambda: Interleaved(has_bias=True, is_transposed=True, is_concatenated=False),
    "a norm behind": lambda: Recorded(has_post_expert_norm=True, post_expert_norm=nn.LayerNorm(H)),
}


@pytest.mark.parametrize("which", MODULES)
def test_the_recorded_call(which: str, backend: str | None, rng: np.random.Generator) -> None:
    """Every kind of module that transformers dispatches: the values and gradients of its loop (faults.md 18, 61)."""
    module, given = MODULES[which](), choices(rng)
    ours = gradients(partial(experts(None, backend=backend), module), module, given)
    assert_close(ours, gradients(module.loop, module, given))


def test_the_recipe_is_what_runs(backend: str | None, rng: np.random.Generator) -> None:
    """The bits of grouped_mlp with it; a stochastic one draws its seeds from torch's generator (faults.md 40)."""
    module, (x, index, weights) = Recorded(), choices(rng)
    function = experts("mxfp8", backend=backend)
    rows, sizes, routing = permute(x, index, E)
    how = {"recipe": octavo.MXFP8(), "backend": backend}
    y = grouped_mlp(rows, module.gate_up_proj, module.down_proj, sizes, probs=routing.to_rows(weights), **how)
    assert torch.equal(function(module, x, index, weights), unpermute(y, routing))
    function = experts(octavo.NVFP4(), backend=backend)
    given = x, index, weights
    first, second = (gradients(lambda *x: function(module, *x), module, given)[1] for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = gradients(lambda *x: function(module, *x), module, given)[1]
    torch.manual_seed(5)
    assert torch.equal(gradients(lambda *x: function(module, *x), module, given)[1], third)


ONE_NODE = {"Recorded": (Recorded, "swiglu", None), "GptOssExperts": (GptOssExperts, "clamped_swiglu", 1)}


@pytest.mark.parametrize("which", ONE_NODE)
def test_the_bits_of_the_parts_in_fewer_bytes(which: str, backend: str | None, rng: np.random.Generator) -> None:
    """FP8 experts through `moe_mlp`: y and gradients are those of permute, grouped_mlp and unpermute, kept is what
    `bytes_kept` says, and less than theirs in the standard form."""
    make, activation, interleave = ONE_NODE[which]
    module, (x, index, weights) = make().bfloat16(), choices(rng)
    x, recipe = x.detach().bfloat16().requires_grad_(), octavo.MXFP8()
    parameters = {value.untyped_storage().data_ptr() for value in module.parameters()}
    turned = (lambda w: w.transpose(1, 2)) if module.is_transposed else (lambda w: w)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)

    def parts(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, sizes, routing = permute(x, index, E)
        probs = routing.to_rows(weights)
        y = grouped_mlp(
            rows, turned(module.gate_up_proj), turned(module.down_proj), sizes, activation=activation, probs=probs,
            bias1=biases[0], bias2=biases[1], bias2_scales=probs if module.has_bias else None, interleave=interleave,
            recipe=recipe, backend=backend,
        )  # fmt: skip
        return unpermute(y, routing)

    def run(function: Any) -> tuple[list[Tensor], int]:
        kept: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            y = function(x, index, weights)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16()
        return [y.detach(), *torch.autograd.grad(y, [x, weights, *module.parameters()], dy)], sum(kept.values())

    expected, most = run(parts)
    shape = MoeShape(T, CHOICES, E, H, INNER)
    for form in ("keep_all", "standard", "recompute"):
        function = experts(recipe, backend=backend, form=form)
        made, kept = run(lambda *given, function=function: function(module, *given))
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)), form
        # of [G, N, K]: panels of weights that lie the other way are filled up along another side on a GPU
        if backend is not None or not module.is_transposed:
            assert kept == bytes_kept(recipe, shape, form, activation=activation, backend=backend).total
        assert kept < most or form != "standard"


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (octavo.DelayedScaling(), "recipe is DelayedScaling, which takes its scales from history"),
        (8, "recipe is 8; give a Recipe"),
    ],
)
def test_recipes_that_no_function_can_run(recipe: Any, sentence: str) -> None:
    """Refused when the function is made, not at some step."""
    for make in (experts, GroupedMM):
        with pytest.raises(ValueError, match=sentence):
            make(recipe)
    with pytest.raises(ValueError, match="form is 'lean and mean'; give one of keep_all"):
        experts(None, form="lean and mean")  # type: ignore[arg-type]


def test_a_known_activation_is_one_node(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked, gpt-oss's too: its clamped SwiGLU was once composed around the model's own gate. So was
    LFM2's activation, which is torch's function and no module."""
    asked: list[tuple[str, str]] = []

    def counted(*given: Any, **how: Any) -> Tensor:
        asked.append((how["activation"], how["form"]))
        return moe_mlp(*given, **how)

    monkeypatch.setattr(adapter, "moe_mlp", counted)
    experts("mxfp8", backend="torch-reference")(GptOssExperts(), *choices(rng))
    experts("mxfp8", backend="torch-reference", form="lean")(Recorded(), *choices(rng))
    experts("mxfp8", backend="torch-reference")(Recorded(act_fn=silu), *choices(rng))
    assert asked == [("clamped_swiglu", "standard"), ("swiglu", "lean"), ("swiglu", "standard")]


CONFIG = {
    "vocab_size": 64, "hidden_size": H, "intermediate_size": INNER, "moe_intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": E, "num_local_experts": E, "num_experts_per_tok": CHOICES, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_inside_transformers(
    kind: str, backend: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole model by name: in high precision the loss and gradients of its own loop; a recipe changes them, and each
    layer of experts asks us once, for a whole MoE layer with an activation of ours."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    config = getattr(transformers, f"{kind}Config")(**CONFIG)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    tokens = torch.tensor(rng.integers(0, 64, (2, 12)))

    def train(name: str) -> list[Tensor]:
        model.set_experts_implementation(name)
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = train("eager")
    name = register(None, backend=backend)
    assert name == "octavo-high_precision"
    assert_close(train(name), plain)
    asked: list[Any] = []
    activations: list[str] = []

    def counted(*given: Any, **how: Any) -> Tensor:
        activations.append(how["activation"])
        return moe_mlp(*given, **how)

    monkeypatch.setattr(adapter, "moe_mlp", counted)
    function = experts("mxfp8", backend=backend, form="standard")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("counted", lambda *given: asked.append(given[0]) or function(*given))
    changed = train("counted")
    assert len(set(asked)) == len(asked) == CONFIG["num_hidden_layers"]
    assert activations == ["clamped_swiglu" if kind == "GptOss" else "swiglu"] * len(asked)
    # the loss alone may round to the same number
    assert not all(torch.equal(new, old) for new, old in zip(changed, plain, strict=True))
    assert all(bool(grad.isfinite().all()) for grad in changed)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_compiled_layers_are_one_graph(kind: str, backend: str | None, rng: np.random.Generator) -> None:
    """`layer.compile()` of a model's layers takes the experts into the layer's graph, and all layers share that graph,
    though nobody has called the recipe before; results are those of the layers as they are."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    layer_types = ["full_attention"] * CONFIG["num_hidden_layers"]
    config = getattr(transformers, f"{kind}Config")(**CONFIG, layer_types=layer_types)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    tokens = torch.tensor(rng.integers(0, 64, (2, 12)))

    def train() -> list[Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model.set_experts_implementation(register(octavo.BlockScaling(), backend=backend, name="compiled"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    compiled = train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    assert_close(compiled, train())
