"""A router's kernels on numpy arrays, on either device. Not tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import octavo_native as native
from octavo.router import RouterRule
from octavo_numerics import Choice

Array = npt.NDArray[Any]
POISON = 0xA5


@dataclass(eq=False)
class Held:
    """Bytes on a device, with room behind them that nobody may write."""

    device: str
    bytes: Any
    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    @property
    def address(self) -> int:
        """Where the first element is."""
        at: int = self.bytes.ctypes.data if self.device == "cpu" else self.bytes.data_ptr()
        return at

    def read(self) -> Array:
        """The array; AssertionError where what is behind it was written."""
        whole = self.bytes if self.device == "cpu" else self.bytes.cpu().numpy()
        size = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        assert (whole[size:] == POISON).all()
        array: Array = whole[:size].view(self.dtype).reshape(self.shape)
        return array


def hold(device: str, array: Array) -> Held:
    """A copy of `array`."""
    flat = np.concatenate([np.ascontiguousarray(array).view(np.uint8).reshape(-1), np.full(64, POISON, np.uint8)])
    if device == "cpu":
        return Held(device, flat, array.shape, array.dtype)
    import torch

    return Held(device, torch.from_numpy(flat).to(device), array.shape, array.dtype)


def poisoned(device: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Held:
    """An output that nobody has written yet."""
    return hold(
        device, np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype).reshape(shape)
    )


def rule_of(rule: RouterRule) -> native.RouterRule:
    """The kernels' form of it."""
    return native.RouterRule(**{**asdict(rule), "score": native.SCORES[rule.score]})


def _logits(held: Held, experts: int) -> native.Logits:
    rows, stride = held.shape
    dtype = native.DTYPES[np.dtype(held.dtype).name]
    return native.Logits(data=held.address, dtype=dtype, tokens=rows, experts=experts, stride=stride)


def choose(
    device: str, logits: Array, rule: RouterRule, bias: Array | None = None, replay: Array | None = None
) -> Choice:
    """What the kernel says of `logits` [T, E], whose rows lie apart."""
    tokens, experts = logits.shape
    wide = hold(device, np.concatenate([logits, np.full((tokens, 3), np.nan, logits.dtype)], 1))
    choices, weights = poisoned(device, (tokens, rule.k), np.int64), poisoned(device, (tokens, rule.k), np.float32)
    counts = poisoned(device, (experts,), np.int64)
    given = {
        name: None if array is None else hold(device, array.astype(dtype))
        for name, array, dtype in (("bias", bias, np.float32), ("replay", replay, np.int64))
    }
    native.choose_experts(
        cuda=device == "cuda", rule=rule_of(rule), logits=_logits(wide, experts), choices=choices.address,
        weights=weights.address, counts=counts.address,
        **{name: 0 if held is None else held.address for name, held in given.items()},
    )  # fmt: skip
    return Choice(choices.read(), weights.read(), counts.read())


def choose_gradient(device: str, logits: Array, rule: RouterRule, choices: Array, dweights: Array) -> Array:
    """The gradient of `logits` by the kernel."""
    held = hold(device, logits)
    chosen, given = hold(device, choices.astype(np.int64)), hold(device, dweights.astype(np.float32))
    made = poisoned(device, logits.shape, logits.dtype)
    native.choose_gradient(
        cuda=device == "cuda", rule=rule_of(rule), logits=_logits(held, logits.shape[1]), choices=chosen.address,
        dweights=given.address, dlogits=made.address,
    )  # fmt: skip
    return made.read()
