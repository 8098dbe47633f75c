"""Every argument of every public function of octavo_torch, with anything in its place: it works or a sentence says why.

A refusal is a ValueError, or NoBackendError where nothing serves the call: one line that names the argument and says
what to give.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import octavo_torch as ot
from octavo import MXFP8, NVFP4, DelayedScaling, NoBackendError, QuantizerSpec

G, K, N, M = 2, 16, 32, 8
BACKEND = "torch-reference"
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")
DELAYED = DelayedScaling(history=2)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def weights_of_choices() -> tuple[torch.Tensor, ot.Routing]:
    rows, _, routing = ot.permute(torch.ones(M, K), torch.zeros(M, 1, dtype=torch.int64), G)
    return rows, routing


def linear(**more: Any) -> dict[str, Any]:
    return {
        "x": leaf(M, K),
        "weight": leaf(G, N, K),
        "group_sizes": [3, 4],
        "recipe": MXFP8(),
        "backend": BACKEND,
        **more,
    }


def mlp(**more: Any) -> dict[str, Any]:
    given = {"x": leaf(M, K), "w1": leaf(G, 2 * N, K), "w2": leaf(G, K, N), "group_sizes": [3, 4], "recipe": MXFP8()}
    return {**given, "backend": BACKEND, **more}


def layer(**more: Any) -> ot.GroupedLinear:
    return ot.GroupedLinear(G, K, N, backend=BACKEND, **more)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "grouped_linear": (ot.grouped_linear, lambda: linear(bias=leaf(G, N), bias_scales=torch.ones(M))),
    "grouped_linear, stateful": (
        ot.grouped_linear,
        lambda: linear(recipe=DELAYED, state=ot.DelayedState.create(DELAYED, G)),
    ),
    "grouped_linear, stochastic": (ot.grouped_linear, lambda: linear(recipe=NVFP4(), seed=1)),
    "grouped_mlp": (
        ot.grouped_mlp,
        lambda: mlp(probs=torch.ones(M), bias1=leaf(G, 2 * N), bias2=leaf(G, K), bias2_scales=torch.ones(M)),
    ),
    "grouped_mm": (
        ot.grouped_mm,
        lambda: {
            "a": leaf(M, K),
            "b": leaf(G, K, N),
            "offs": torch.tensor([3, 7], dtype=torch.int32),
            "recipe": MXFP8(),
        },
    ),
    "quantize": (ot.quantize, lambda: {"x": torch.ones(M, K), "spec": SPEC, "group_sizes": [3, 4], "backend": BACKEND}),
    "quantize_weight": (ot.quantize_weight, lambda: {"w": leaf(G, N, K), "recipe": MXFP8(), "backend": BACKEND}),
    "dequantize": (ot.dequantize, lambda: {"q": ot.quantize(torch.ones(M, K), SPEC, backend=BACKEND)}),
    "explain_mlp": (ot.explain_mlp, mlp),
    "permute": (
        ot.permute,
        lambda: {
            "x": leaf(M, K),
            "expert_index": torch.zeros(M, 1, dtype=torch.int64),
            "num_groups": G,
            "backend": BACKEND,
        },
    ),
    "unpermute": (
        ot.unpermute,
        lambda: (
            dict(zip(("rows", "routing"), weights_of_choices(), strict=True))
            | {"weights": torch.ones(M, 1), "backend": BACKEND}
        ),
    ),
    "activate": (ot.activate, lambda: {"x": leaf(M, 2 * N), "activation": "swiglu", "probs": torch.ones(M)}),
    "Activation": (ot.Activation, lambda: {"activation": "swiglu"}),
    "DelayedState.create": (ot.DelayedState.create, lambda: {"recipe": DELAYED, "num_groups": G}),
    "GroupedLinear": (
        ot.GroupedLinear,
        lambda: {"num_groups": G, "in_features": K, "out_features": N, "recipe": MXFP8(), "seed": 1},
    ),
    "GroupedLinear.forward": (
        lambda **given: layer(recipe=MXFP8()).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4]},
    ),
    "GroupedMLP": (
        ot.GroupedMLP,
        lambda: {"num_groups": G, "in_features": K, "hidden_features": N, "out_features": K, "recipe": MXFP8()},
    ),
    "GroupedMLP.forward": (
        lambda **given: ot.GroupedMLP(G, K, N, recipe=MXFP8(), backend=BACKEND).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4], "probs": torch.ones(M)},
    ),
    "Sequential": (lambda operation: ot.Sequential(operation), lambda: {"operation": layer()}),
    "Sequential.forward": (
        lambda **given: ot.Sequential(layer(), ot.Activation("swiglu")).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4], "probs": torch.ones(M)},
    ),
    "convert": (ot.convert, lambda: {"model": layer(), "recipe": MXFP8(), "filter": "*"}),
    "update_scales": (ot.update_scales, lambda: {"module": layer()}),
}
MODULE = ("backend", "device", "dtype", "bias", "main_grad", "per_group_parameters", "delay_wgrad")
MORE = {
    "grouped_linear": ("seed", "state", "group_offset", "out", "grad_input", "main_grad", "delayed_wgrad"),
    "grouped_linear, stochastic": ("group_offset",),
    "grouped_mlp": (
        "activation", "interleave", "seed", "state", "group_offset", "out", "grad_input", "main_grad", "delayed_wgrad",
    ),
    "grouped_mm": ("bias", "out_dtype"),
    "quantize": ("seed", "operand", "group_offset", "scale"),
    "quantize_weight": ("seed", "state", "interleave", "out", "unchanged"),
    "dequantize": ("direction",),
    "explain_mlp": ("activation",),
    "DelayedState.create": ("device",),
    "GroupedLinear": MODULE,
    "GroupedLinear.forward": ("weight", "bias_scales", "out", "grad_input"),
    "GroupedMLP": ("activation", "seed", "interleave", *MODULE),
    "GroupedMLP.forward": ("weights", "bias2_scales"),
    "convert": ("seed", "backend"),
    "update_scales": ("process_group",),
}  # fmt: skip
"""Arguments that the valid call leaves out."""

CASES = [(name, argument) for name, (_, valid) in CALLS.items() for argument in (*valid(), *MORE.get(name, ()))]
OTHER_NAMES = {
    "recipe": {"state", "seed"},  # another recipe wants another state: the state is told of
    "operation": {"operation 0"},
}

WAY_ON = re.compile(
    r"\b(give|leave|move|make|call|take|write|set|use|keep|cast|at most|are integers|zero or more|known names)\b"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64)
SIDES = st.sampled_from((0, 1, G, M, K, N, 2 * N, 3))
FITTING = [(M, K), (G, N, K), (G, 2 * N, K), (G, K, N), (G, N), (M,), (G,), (M, N), (G, K), (M, 1), ()]


def tensor(shape: Any, dtype: torch.dtype, where: str) -> Any:
    made = torch.zeros(tuple(shape), dtype=dtype)
    kinds: dict[str, Callable[[], Any]] = {
        "cpu": lambda: made,
        "meta": lambda: made.to("meta"),
        "turned": lambda: made.transpose(0, -1) if made.dim() else made,
        "expanded": lambda: torch.zeros((), dtype=dtype).expand(tuple(shape)),
        "numpy": lambda: np.zeros(tuple(shape)),
        "sparse": lambda: made.to_sparse() if made.dim() else made,
        "leaf": lambda: made.requires_grad_() if dtype.is_floating_point else made,
    }
    return kinds[where]()


SHAPES = st.one_of(st.sampled_from(FITTING), st.lists(SIDES, max_size=4))
WHERE = st.sampled_from(("cpu", "meta", "turned", "expanded", "numpy", "sparse", "leaf"))
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),  # more would be memory
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(-3, 1 << 66), max_size=4),
    st.lists(st.floats(), max_size=3).map(tuple),
    st.builds(tensor, SHAPES, st.sampled_from(DTYPES), WHERE),
    st.sampled_from(
        (MXFP8(), NVFP4(), DELAYED, SPEC, MXFP8, print, object(), {}, {"a": 1}, nn.Linear(2, 2), torch.float64, 1 << 70,
         "swiglu", "gelu", "rowwise", "x", "accumulate", "mxfp8", [BACKEND], ["no such"], np.array([3, 4]), range(G))
    ),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}({argument})" for name, argument in CASES])
@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True)
@example(value=object())
@example(value=None)
@example(value=-1)
@example(value="?")
@given(value=ANYTHING)
def test_it_works_or_a_sentence_says_why(name: str, argument: str, value: Any) -> None:
    """No other exception ever gets out, and the refusal names the argument (faults.md 58, 61)."""
    if argument == "filter" and callable(value):
        return  # a function of the caller's raises what it likes
    function, valid = CALLS[name]
    arguments = valid() | {argument: value}
    told = None
    try:
        function(**arguments)
    except NoBackendError:
        return
    except ValueError as error:
        told = str(error)
    if told is not None:
        assert "\n" not in told, told
        # what is of the right kind may fit alone and not beside another argument, which is then the one that is told of
        plain = value is None or isinstance(value, int | float) or type(value) is object
        blamed = {argument} if plain else {*arguments, "tensor", argument}
        names = {part for name in blamed for part in (name, name.split("_")[-1])} | OTHER_NAMES.get(argument, set())
        assert any(re.search(rf"\b{re.escape(word)}", told) for word in names), f"{argument}: {told}"
        assert WAY_ON.search(told), f"{argument}: {told}"


def test_every_public_argument_is_there() -> None:
    """A new argument of a function in the table is fuzzed, or this test fails."""
    for name, (function, valid) in CALLS.items():
        if function.__name__ != "<lambda>" and "," not in name:
            given = {*valid(), *MORE.get(name, ())}
            assert set(inspect.signature(function).parameters) == given, name
