"""bytes_kept: what moe_mlp keeps for its backward, to the byte, and that it is little."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from moe_layers import FORMS, RECIPES, REFERENCE, C, F, G, K, N, T, composed, draw, states_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import octavo_numerics
from octavo import BlockScaling
from octavo_torch import MoeShape, bytes_kept, moe_mlp
from octavo_torch.bridge import BRIDGE
from octavo_torch.moe.forms import keep_rows, rows_plan

SHAPE = MoeShape(T, C, G, K, F, N)


class Kept:
    """Sizes of the storages that autograd keeps, but for those of `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._others = {value.untyped_storage().data_ptr() for value in parameters}
        self._tensors: dict[int, Tensor] = {}

    def pack(self, value: Tensor) -> Tensor:
        """A hook of autograd's."""
        address = value.untyped_storage().data_ptr()
        if address not in self._others:
            self._tensors[address] = value
        return value

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(value.untyped_storage().nbytes() for value in self._tensors.values())


def measured(given: dict[str, Tensor], call: Any) -> int:
    kept = Kept(given[name] for name in ("w1", "w2", "bias1", "bias2"))
    with saved_tensors_hooks(kept.pack, lambda value: value):
        y = call(**given)
    assert y.requires_grad
    return kept.bytes


@pytest.mark.parametrize("name", RECIPES)
def test_every_byte_is_predicted(name: str, rng: np.random.Generator) -> None:
    """The storages that autograd holds after a forward are those that bytes_kept counts, in every form."""
    recipe = RECIPES[name]
    given, choices = draw(rng)
    how = {"choices": choices, "recipe": recipe, "seed": 7, "state": states_of(recipe), "backend": REFERENCE}
    for form in FORMS:
        for weight_codes in ("keep", "remake"):
            some: dict[str, Any] = {"form": form, "weight_codes": weight_codes}
            predicted = bytes_kept(recipe, SHAPE, backend=REFERENCE, **some)
            assert predicted.total == measured(given, lambda some=some, **args: moe_mlp(**args, **how, **some)), some


def test_forms_are_in_order() -> None:
    """Each form keeps less than the one before, and a standard one no more than SonicMoE's 2 K + 4 F k bytes and what a
    router's choices are, in every recipe."""
    shape = MoeShape(8192, 8, 128, 2048, 768)
    for recipe in RECIPES.values():
        each = {
            form: bytes_kept(recipe, shape, form, weight_codes="remake", backend=REFERENCE).per_token  # type: ignore[arg-type]
            for form in ("keep_all", "standard", "lean", "recompute")
        }
        assert list(each.values()) == sorted(each.values(), reverse=True)
        routing, state = 8 * (8 + 4), 24 * 128 / 8192
        assert each["standard"] <= 2 * 2048 + 4 * 768 * 8 + routing + state
        assert each["lean"] <= 0.6 * (2 * 2048 + 4 * 768 * 8) + routing + state


def test_less_than_the_composed_form(rng: np.random.Generator) -> None:
    """permute, grouped_mlp and unpermute keep codes of x once for each choice, and the activation's."""
    tokens = 1000  # so that the codes of the weights, which both keep, count little
    given, choices = draw(rng, tokens=tokens)
    given = {name: given[name] for name in ("x", "weights", "w1", "w2")}
    how: dict[str, Any] = {"recipe": BlockScaling(), "backend": REFERENCE}
    kept = Kept([given["w1"], given["w2"]])
    with saved_tensors_hooks(kept.pack, lambda value: value):
        composed(given, choices, **how)
    shape = MoeShape(tokens, C, G, K, F, N)
    assert bytes_kept(BlockScaling(), shape, backend=REFERENCE).total < 0.8 * kept.bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lean_rows_are_their_definition(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """What backward reads of kept codes is octavo_numerics.keep_rows, bit for bit, and zero past the sum."""
    rows = (torch.randn(9, 200) * torch.exp2(torch.randint(-12, 12, (9, 1)))).to(dtype)
    rows[0, :3] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal, 0])
    sizes = torch.tensor([3, 0, 4])
    kept = keep_rows(rows_plan(rows, 200, 3, REFERENCE), rows, sizes, REFERENCE)
    assert kept.codes.nbytes + kept.scales.nbytes == 9 * 200 + 9 * 2 * 4
    read = kept.reader.rows(kept.codes, kept.scales, sizes, dtype)
    expected = BRIDGE.from_numpy(octavo_numerics.keep_rows(BRIDGE.to_numpy(rows[:7])), "cpu")
    assert read.dtype is dtype
    assert torch.equal(read[:7], expected)
    assert not read[7:].any()


def test_k_has_an_old_name() -> None:
    """`choices` gives the same shape with one warning, and is refused beside k."""
    old: Any = MoeShape
    sides = {"tokens": T, "experts": G, "in_features": K, "hidden_features": F, "out_features": N}
    with pytest.warns(DeprecationWarning, match="choices is called k now") as said:
        assert old(**sides, choices=C) == SHAPE
    assert [one.filename for one in said] == [__file__]
    assert SHAPE.choices == SHAPE.k == C
    with pytest.raises(TypeError, match="both were given; give k alone"):
        old(**sides, k=C, choices=C)


def test_messages() -> None:
    """Errors name the argument, what was given, and what is needed."""
    with pytest.raises(ValueError, match=r"shape is a tuple; give an octavo_torch\.MoeShape"):
        bytes_kept(None, (1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens is 0; give an integer of at least 1"):
        bytes_kept(None, MoeShape(0, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="form is 'all'"):
        bytes_kept(None, SHAPE, "all")  # type: ignore[arg-type]
