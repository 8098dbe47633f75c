"""observe: what it counts is what the quantizers of a step did, it changes no bit, and it waits for no device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
import octavo_torch as ot
from octavo import DelayedScaling, Recipe
from octavo.health import FIELDS
from octavo_torch.arithmetic.quantize import Noise
from octavo_torch.arithmetic.stats import operand_stats
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.scaling.probe import Probe

SIZES = torch.tensor([90, 0, 70])
RECIPES: dict[str, Recipe] = {
    "mxfp8": octavo.recipe("mxfp8"),
    "nvfp4": octavo.recipe("nvfp4"),
    "delayed": DelayedScaling(history=2),
    "bf16": octavo.recipe("bf16"),
}


class Model(nn.Module):
    """An expert MLP and a grouped layer behind it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.mlp = ot.GroupedMLP(3, 64, 96, recipe=recipe, dtype=torch.bfloat16, seed=1)
        self.head = ot.GroupedLinear(3, 64, 32, recipe=recipe, dtype=torch.bfloat16, seed=2)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(x, sizes), sizes)
        return y


def rows() -> Tensor:
    return torch.randn(200, 64).bfloat16().requires_grad_()


def train(model: Callable[[Tensor, Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    y = model(x, SIZES)
    return [y.detach(), *torch.autograd.grad(y, [x], dy)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_counts_each_operand_and_changes_no_bit(name: str, rng: object) -> None:
    """x, w and dy of each layer, those inside of an MLP, too; an unobserved model has the same results."""
    model = Model(RECIPES[name])
    twin = copy.deepcopy(model)
    x, dy = rows(), torch.randn(200, 32).bfloat16()
    with ot.observe(model, rows=None) as observer:
        ours = train(model, x, dy)
        seen = observer.step()
    for a, b in zip(ours, train(twin, x, dy), strict=True):
        assert torch.equal(a, b)
    assert seen is not None
    stats = seen.tensors()
    assert list(stats) == ["mlp.fc1", "mlp.fc2", "head"]
    widths = {"mlp.fc1": (64, 192), "mlp.fc2": (96, 64), "head": (64, 32)}
    for layer, (inputs, outputs) in widths.items():
        of_layer = stats[layer]
        assert of_layer["x"].elements.tolist() == [90 * inputs, 0, 70 * inputs]
        assert of_layer["dy"].elements.tolist() == [90 * outputs, 0, 70 * outputs]
        assert of_layer["w"].elements.tolist() == [inputs * outputs] * 3
    assert stats["mlp.fc1"]["x"].amax.tolist() == ot.group_amax(x.detach(), SIZES).tolist()
    assert stats["head"]["dy"].amax.tolist() == ot.group_amax(dy, SIZES).tolist()
    numbers = seen.as_dict(experts=True)
    quantized = name != "bf16"
    assert ("octavo/mlp.fc2/x/sqnr_db" in numbers) is quantized
    assert ("octavo/mlp.fc1/dy/expert2/sqnr_db" in numbers) is quantized
    assert "octavo/head/x/expert1/amax" not in numbers  # an expert without rows has no numbers
    assert all(isinstance(value, float) for value in numbers.values())


@pytest.mark.parametrize("given", [False, True], ids=["values", "codes"])
def test_gate_and_up_rows_in_turns_are_counted_as_they_are_quantized(given: bool, rng: object) -> None:
    """In two halves, which square blocks are of: whoever quantizes the weight, in the call or in front of it."""
    counted = []
    w1, w2 = (torch.randn(3, 192, 64) * torch.rand(3, 192, 1).exp2()).bfloat16(), torch.randn(3, 64, 96).bfloat16()
    for block in (None, 4):
        layer = ot.GroupedMLP(3, 64, 96, recipe=octavo.recipe("fp8-block"), dtype=torch.bfloat16, interleave=block)
        with torch.no_grad():
            layer.weight1.copy_(w1 if block is None else from_halves(w1, block))
            layer.weight2.copy_(w2)
        with ot.observe(layer, rows=None) as observer:
            layer(rows().detach(), SIZES, weights=layer.quantize_weights() if given else None)
            seen = observer.step()
        assert seen is not None
        counted.append(seen.tensors()["fc1"]["w"])
    for name in FIELDS:
        assert torch.equal(*(getattr(each, name) for each in counted))


@pytest.mark.parametrize("observed", [0, 2])
def test_one_layer_of_a_row_is_counted(observed: int, rng: object) -> None:
    """Of a Sequential whose layers would be fused: the counts are those of the layer when all are observed."""
    how: dict[str, Any] = {"recipe": "mxfp8", "dtype": torch.bfloat16, "backend": "torch-reference"}
    model = ot.Sequential(
        ot.GroupedLinear(3, 64, 96, **how), ot.Activation("relu2"), ot.GroupedLinear(3, 96, 32, **how)
    )
    x, dy, seen = rows(), torch.randn(200, 32).bfloat16(), []
    for module in (model, model.operations[observed]):
        with ot.observe(module, rows=None) as observer:
            model(x, [120, 0, 80]).backward(dy)
            step = observer.step()
            assert step is not None
            seen.append(step.totals[str(observed) if module is model else "model"])
    assert torch.equal(*seen)


@pytest.mark.parametrize("form", ["standard", "keep_all", "lean", "recompute"])
def test_a_moe_layer_counts_what_its_experts_alone_would(form: Any, rng: object) -> None:
    """MoE's fc1 and fc2 have the counts of a GroupedMLP on permuted rows; what backward makes again counts once."""
    layer = ot.MoE(3, 64, 96, 2, recipe="mxfp8", dtype=torch.bfloat16, form=form)
    experts = ot.GroupedMLP(3, 64, 96, recipe="mxfp8", dtype=torch.bfloat16)
    experts.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "router"})
    x, dy = rows(), torch.randn(200, 64).bfloat16()
    with torch.no_grad():
        choice = layer.choose(x)
    with ot.observe(layer, rows=None) as observer:
        layer(x, choice).backward(dy)
        ours = observer.step()
    with ot.observe(experts, rows=None) as observer:
        permuted, sizes, routing = ot.permute(x, choice.choices, 3)
        ot.unpermute(experts(permuted, sizes, routing.to_rows(choice.weights)), routing).backward(dy)
        theirs = observer.step()
    assert ours is not None
    assert theirs is not None
    ours_stats, their_stats = ours.tensors(), theirs.tensors()
    assert list(ours_stats) == list(their_stats) == ["fc1", "fc2"]
    for part, of_layer in their_stats.items():
        for operand, expected in of_layer.items():
            if form == "lean" and (part, operand) == ("fc1", "dy"):
                continue  # the activation's gradient is taken at the kept codes
            for field in FIELDS:
                counted = getattr(ours_stats[part][operand], field)
                assert torch.equal(counted, getattr(expected, field)), (part, operand, field)


def test_the_numbers_are_those_of_tensor_stats(rng: object) -> None:
    """With the scales of delayed scaling that the step used, not those that it leaves."""
    recipe = DelayedScaling(history=2)
    layer = ot.GroupedLinear(3, 64, 32, recipe=recipe, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.encode_scale.copy_(torch.tensor([[900.0, 2, 3], [40, 50, 60], [7, 8, 9]]))
    scales = layer.encode_scale.clone()
    x, dy = rows(), torch.randn(200, 32).bfloat16()
    with ot.observe(layer, rows=None) as observer:
        train(layer, x, dy)
        layer.update_scales()
        seen = observer.step()
    assert seen is not None
    given = {"x": (x.detach(), SIZES), "w": (layer.weight.detach(), None), "dy": (dy, SIZES)}
    for number, (operand, (value, sizes)) in enumerate(given.items()):
        spec = recipe.quantizer(operand)  # type: ignore[arg-type]
        assert spec is not None
        expected = ot.tensor_stats(value, spec, sizes, scale=scales[number])
        for field in ("amax", "saturated", "underflow", "noise"):
            assert torch.equal(getattr(seen.tensors()["model"][operand], field), getattr(expected, field)), field
    assert seen.tensors()["model"]["x"].saturated[0] > 0


def test_microbatches_of_a_step_add_up_and_the_largest_amax_counts(rng: object) -> None:
    """An amax is no sum: with eight microbatches it would look like a gradient that explodes."""
    layer = ot.GroupedLinear(3, 64, 32, recipe="mxfp8", dtype=torch.bfloat16)
    microbatches = [rows() for _ in range(3)]
    with ot.observe(layer, rows=None) as observer:
        for x in microbatches:
            train(layer, x, torch.randn(200, 32).bfloat16())
        seen = observer.step()
    assert seen is not None
    counted = seen.tensors()["model"]["x"]
    amaxes = torch.stack([ot.group_amax(x.detach(), SIZES) for x in microbatches])
    assert counted.amax.tolist() == amaxes.amax(0).tolist()
    assert counted.elements.tolist() == [3 * 90 * 64, 0, 3 * 70 * 64]


def test_only_the_steps_that_were_asked_for_are_counted(rng: object) -> None:
    """Step 0 and each third; microbatches add up; afterwards the layers are as they were."""
    model = Model(RECIPES["mxfp8"])
    with ot.observe(model, every=3) as observer:
        steps = []
        for _ in range(5):
            assert observer.observing is bool(model.mlp.probes)
            for _ in range(2):
                train(model, rows(), torch.randn(200, 32).bfloat16())
            seen = observer.step()
            if seen is not None:
                steps.append(seen.step)
                assert seen.tensors()["head"]["x"].elements.tolist() == [2 * 90 * 64, 0, 2 * 70 * 64]
        assert steps == [0, 3]
    assert model.mlp.probes == ()
    assert "probes" not in vars(model.mlp)


def test_values_that_are_not_finite_are_seen_in_rows_that_the_sample_leaves_out(rng: object) -> None:
    """The amax is that of all rows."""
    layer = ot.GroupedLinear(1, 64, 32, recipe=RECIPES["mxfp8"], dtype=torch.bfloat16)
    x = torch.randn(1000, 64).bfloat16()
    x[999, 1] = torch.nan
    with ot.observe(layer) as observer:
        layer(x, [1000])
        seen = observer.step()
    assert seen is not None
    numbers = seen.as_dict("")
    assert numbers["model/x/amax"] != numbers["model/x/amax"]
    assert seen.tensors()["model"]["x"].elements.tolist() == [128 * 64]
    assert "model/dy/amax" not in numbers


@pytest.mark.parametrize("name", [pytest.param("nvfp4", marks=pytest.mark.slow), "delayed"])
def test_one_graph_for_observed_steps_and_one_for_others(name: str, rng: object) -> None:
    """torch.compile, fullgraph: eager's numbers, and no third graph."""
    model = Model(RECIPES[name])
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ot.observe(model, every=2) as ours, ot.observe(twin, every=2) as theirs:
        for _ in range(4):
            x, dy = rows(), torch.randn(200, 32).bfloat16()
            for a, b in zip(train(compiled, x, dy), train(twin, x, dy), strict=True):
                assert torch.equal(a, b)
            mine, his = ours.step(), theirs.step()
            assert (mine is None) is (his is None)
            if mine is not None and his is not None:
                assert mine.as_dict() == his.as_dict()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed"])
def test_nothing_is_read_back(name: str) -> None:
    """Tensors without values go through: an `item()` or a branch on a value would raise."""
    with FakeTensorMode():
        probe = Probe.create(RECIPES[name], 3, 128, torch.device("cpu"))
        state = ot.DelayedState.create(RECIPES[name], 3) if name == "delayed" else None  # type: ignore[arg-type]
        sizes = torch.ones(3, dtype=torch.int64)
        for operand, value in (
            ("x", torch.empty(200, 64)),
            ("w", torch.empty(3, 160, 64)),
            ("dy", torch.empty(200, 32)),
        ):
            spec = RECIPES[name].quantizer(operand)  # type: ignore[arg-type]
            assert spec is not None
            noise = Noise(torch.zeros((), dtype=torch.int64), 0, 0) if spec.stochastic else None
            scale = None if state is None else state.encode_scale(operand)  # type: ignore[arg-type]
            of = None if operand == "w" else sizes
            counted = operand_stats(value, of, spec, spec.directions[0], noise, scale, probe.rows)
            assert counted.shape == probe.totals[0].shape


def test_weights_that_were_quantized_before_are_counted_from_their_values(rng: object) -> None:
    """The codes of `quantize_weight` come with the weight."""
    layer = ot.GroupedLinear(3, 64, 32, recipe=RECIPES["mxfp8"], dtype=torch.bfloat16)
    x = ot.quantize_input(rows().detach(), layer.weight, SIZES, layer.recipe)
    with ot.observe(layer) as observer:
        layer(x, None, weight=layer.quantize_weight())
        seen = observer.step()
    assert seen is not None
    stats = seen.tensors()["model"]
    assert stats["w"].elements.tolist() == [32 * 64] * 3
    assert stats["x"].elements.tolist() == [0] * 3


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        (None, {}, "model is None"),
        (nn.Linear(2, 2), {}, "no GroupedLinear"),
        (Model(RECIPES["mxfp8"]), {"every": 0}, "every is 0"),
        (Model(RECIPES["mxfp8"]), {"every": True}, "every is True"),
        (Model(RECIPES["mxfp8"]), {"rows": 100}, "rows is 100"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, arguments: dict[str, Any], named: str) -> None:
    """With the argument, what was given and what is needed."""
    with pytest.raises(ValueError, match=named):
        ot.observe(model, **arguments)


@pytest.mark.parametrize("every", [1, 2])
def test_a_recipe_that_changes_is_counted_as_it_is(every: int, rng: object) -> None:
    """`convert` in an observed step, or between two: numbers of the recipe before would look like those of the new."""
    model = Model(RECIPES["mxfp8"])
    x, dy = rows(), torch.randn(200, 32).bfloat16()
    with ot.observe(model, every=every, rows=None) as observer:
        for _ in range(every):
            train(model, x, dy)
            if every > 1:
                observer.step()
            ot.convert(model, RECIPES["nvfp4"], seed=1)
        train(model, x, dy)
        seen = observer.step()
    ot.convert(model, RECIPES["nvfp4"], seed=1)  # the same random bits again
    with ot.observe(model, rows=None) as other:
        train(model, x, dy)
        expected = other.step()
    assert seen is not None
    assert expected is not None
    for name, totals in expected.totals.items():
        assert torch.equal(seen.totals[name], totals), name
