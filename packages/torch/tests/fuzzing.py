"""Any value in the place of an argument, and the judge of what comes of it: it works, or a sentence says why."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from octavo import MXFP8, NVFP4, DelayedScaling, NoBackendError, QuantizerSpec

G, K, N, M = 2, 16, 32, 8
BACKEND = "torch-reference"
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")
DELAYED = DelayedScaling(history=2)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


OTHER_NAMES = {
    "recipe": {"state", "seed"},  # another recipe wants another state: the state is told of
    "payload": {"recipe"},  # which is looked up among the recipes
    "operation": {"operation 0"},
    "group_sizes": {"scale"},  # without sizes there is a single group, and the scales are those of more
}

WAY_ON = re.compile(
    r"\b(give|leave|move|make|create|call|take|write|set|use|keep|cast|at most|are integers|zero or more|known names)\b"
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
         "swiglu", "clamped_swiglu", "gelu", "rowwise", "x", "accumulate", "mxfp8", [BACKEND], ["no such"],
         np.array([3, 4]), range(G))
    ),
)  # fmt: skip


def other_kinds(valid: torch.Tensor) -> dict[str, Any]:
    """What has the shape, or nearly the shape, of a tensor that fits, and is of another kind: any of it may be refused.

    Drawn at random, a shape that fits meets a kind that does not once in hundreds of runs; these are in every run.
    """
    plain = valid.detach()
    other = torch.float64 if plain.is_floating_point() else torch.float32
    flat = plain.dim() == 2
    return {
        "sparse": plain.to_sparse(),
        **({"compressed": plain.to_sparse_csr(), "blocked": plain.to_sparse_bsr((1, 1))} if flat else {}),
        **({"nested": nested(plain, torch.strided), "jagged": nested(plain, torch.jagged)} if plain.dim() > 1 else {}),
        "meta": plain.to("meta"),
        "other dtype": plain.to(other),
        "complex": plain.to(torch.complex64),
        "truth": plain.bool(),
        "bytes": plain.to(torch.uint8),
        "numpy": plain.numpy(),
        "list": plain.tolist(),
        "expanded": plain[:1].expand(plain.shape) if plain.dim() else plain,
        "strided": plain.repeat_interleave(2, -1)[..., ::2] if plain.dim() else plain,
        "turned": plain.transpose(0, -1) if plain.dim() else plain,
        "one axis more": plain[None],
        "flat": plain.reshape(-1),
        "scalar": plain.reshape(-1)[0] if plain.numel() else plain,
        "no rows": plain[:0] if plain.dim() else plain,
        "no columns": plain[..., :0] if plain.dim() else plain,
        "parameter": nn.Parameter(plain.clone(), requires_grad=plain.is_floating_point()),
        "view of a leaf": plain.clone().requires_grad_()[:] if plain.is_floating_point() and flat else plain,
        "subclass": plain.as_subclass(Marked),
    }


def nested(values: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    """Two parts of `values` of different lengths. A strided one has no shape."""
    with warnings.catch_warnings(action="ignore"):  # torch tells of its prototype
        made: torch.Tensor = torch.nested.nested_tensor([values[:1], values], layout=layout)
    return made


def judge_kinds(function: Callable[..., Any], arguments: Callable[[], dict[str, Any]], argument: str) -> None:
    """`judge` of every other kind of the tensor that fits; `arguments` makes those of a call that works."""
    for kind, value in other_kinds(arguments()[argument]).items():
        try:
            judge(function, arguments() | {argument: value}, argument, value)
        except BaseException as error:
            error.add_note(f"{argument} was {kind}")
            raise


class Marked(torch.Tensor):
    """A tensor of a class of the caller's."""


def with_anything(test: Callable[..., None]) -> Any:
    """`test`, called with many a `value`."""
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    made = settings(max_examples=8, print_blob=True, **quiet)(given(value=ANYTHING)(test))
    for value in (object(), None, -1, "", "?", 0, 1 << 70, math.nan, np.zeros(2), np.zeros(()), nn.Linear(2, 2)):
        made = example(value=value)(made)
    return made


def judge(function: Callable[..., Any], arguments: dict[str, Any], argument: str, value: Any) -> None:
    """Call it; no exception but NoBackendError and a ValueError in one line, which names `argument` and a way on."""
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
