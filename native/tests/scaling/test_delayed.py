"""Delayed scaling's state: the kernels against the definition in octavo_numerics, on every device there is."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from devices import PLACES
from flushing import flushed_subnormals, sets_mode

import octavo_native as native
import octavo_numerics
from octavo.formats import FORMAT_MAX, Format
from octavo_numerics import DelayedState

FORMATS: tuple[Format, ...] = ("e4m3", "e4m3", "e5m2")
SPECIAL = np.array([0.0, 1e-45, 3e38, np.inf, np.nan], np.float32)
F32 = npt.NDArray[np.float32]


class Device:
    """Arrays on a CPU or a GPU, by address."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def put(self, array: F32) -> tuple[Any, int]:
        """A copy, and where it is."""
        if not self.cuda:
            copy = array.copy()
            return copy, copy.ctypes.data
        import torch

        tensor = torch.from_numpy(array.copy()).cuda()
        return tensor, tensor.data_ptr()

    def get(self, held: Any) -> F32:
        """The values."""
        made: F32 = held.cpu().numpy() if self.cuda else held
        return made


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Device:
    """Each device; skipped where it is not there."""
    return Device(request.param == "cuda")


def drawn(rng: np.random.Generator, *shape: int) -> F32:
    """Amaxes of every size, and now and then what is none."""
    values = np.exp(rng.uniform(-20, 20, shape)).astype(np.float32)
    odd = rng.random(shape) < 0.1
    values[odd] = rng.choice(SPECIAL, int(odd.sum()))
    return values


@pytest.mark.parametrize("groups", [1, 5, 128, 300])
def test_recorded_amax_is_the_definitions(device: Device, groups: int, rng: np.random.Generator) -> None:
    """Slot 0 is raised, NaN is not recorded, other slots stay as they are."""
    history, amax = drawn(rng, 3, 4, groups), drawn(rng, 3, groups)
    history[:, 0] = np.nan_to_num(history[:, 0], nan=0.0, posinf=np.inf)
    held, at = device.put(history)
    keep, given = device.put(amax)
    native.record_amax(cuda=device.cuda, amax=given, history=at, operands=3, slots=4, groups=groups)
    history[:, 0] = np.maximum(history[:, 0], np.where(np.isnan(amax), 0, amax))
    assert np.array_equal(device.get(held), history, equal_nan=True)
    del keep


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("slots", "groups"), [(2, 1), (3, 7), (16, 40), (257, 33), (1024, 128)])
@pytest.mark.parametrize("reduce", [False, True])
def test_an_update_is_the_definitions(
    device: Device,
    algorithm: Literal["max", "most_recent"],
    slots: int,
    groups: int,
    reduce: bool,
    rng: np.random.Generator,
) -> None:
    """Histories and scales of x, w and dy after a step, bit for bit; unseen groups and odd amaxes among them."""
    history, scale = drawn(rng, 3, slots, groups), np.exp2(rng.integers(-9, 9, (3, groups))).astype(np.float32)
    history = np.nan_to_num(history, nan=0.0, posinf=np.inf)
    reduced = drawn(rng, 3, groups)
    expected = [
        octavo_numerics.update_delayed(
            DelayedState(history[i], scale[i]), FORMATS[i], algorithm=algorithm, margin=2,
            reduced_amax=np.nan_to_num(reduced[i], nan=0.0, posinf=np.inf) if reduce else None,
        )
        for i in range(3)
    ]  # fmt: skip
    (held, at), (scales, to), (keep, given) = device.put(history), device.put(scale), device.put(reduced)
    maxima = [FORMAT_MAX[fmt] / 4 for fmt in FORMATS]
    native.update_scales(
        cuda=device.cuda, history=at, scale=to, maxima=maxima, slots=slots, groups=groups,
        most_recent=algorithm == "most_recent", reduced=given if reduce else 0,
    )  # fmt: skip
    assert np.array_equal(device.get(held), np.stack([state.history for state in expected]))
    assert np.array_equal(device.get(scales), np.stack([state.scale for state in expected]))
    del keep


@sets_mode
def test_a_caller_that_flushes_subnormals() -> None:
    """An amax below the normal numbers is recorded, and counts in the next scale, whatever the caller's mode."""
    history, scale = np.array([[[1e-40, 0.0], [2e-38, 3e-39]]], np.float32), np.ones((1, 2), np.float32)
    amax = np.array([[2e-40, 1e-41]], np.float32)
    raised = history.copy()
    raised[:, 0] = amax
    expected = octavo_numerics.update_delayed(DelayedState(raised[0], scale[0]), "e4m3", algorithm="max", margin=0)
    common = {"cuda": False, "history": history.ctypes.data, "slots": 2, "groups": 2}
    with flushed_subnormals():
        native.record_amax(amax=amax.ctypes.data, operands=1, **common)
        native.update_scales(scale=scale.ctypes.data, maxima=[FORMAT_MAX["e4m3"]], most_recent=False, **common)
    assert np.array_equal(history[0].view(np.uint32), expected.history.view(np.uint32))
    assert np.array_equal(scale[0], expected.scale)


def test_wrong_states() -> None:
    """Sentences for what cannot be a history."""
    given: dict[str, Any] = {"cuda": False, "history": 256, "slots": 4, "groups": 3}
    with pytest.raises(ValueError, match="operands is not 1 to 3"):
        native.record_amax(amax=256, operands=4, **given)
    with pytest.raises(ValueError, match="amax or history is null"):
        native.record_amax(amax=0, operands=1, **given)
    with pytest.raises(ValueError, match="not aligned to 4 bytes"):
        native.record_amax(amax=258, operands=1, **given)
    given |= {"scale": 256, "most_recent": False}
    with pytest.raises(ValueError, match="maxima are more than 3"):
        native.update_scales(maxima=[1.0] * 4, **given)
    with pytest.raises(ValueError, match="slots is less than 2"):
        native.update_scales(maxima=[1.0], **given | {"slots": 1})
    for name in ("history", "scale", "reduced"):
        with pytest.raises(ValueError, match="not aligned to 4 bytes"):
            native.update_scales(maxima=[1.0], **given | {name: 258})
