"""Fresh problems from a seed that a failing test prints, poisoned memory, and the definition to compare with."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import octavo_numerics
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_conformance.problems.inputs import CLASSES, draw, draw_mixed, draw_sizes
from octavo_torch import GroupedTensor, check_errors
from octavo_torch.bridge import BRIDGE

PLANES = octavo_numerics.PLANES


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; torch's own generator is seeded with it, too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty returns holds 0xFF bytes, NaN in every dtype: whatever a kernel leaves out is seen.

    Not while a pass is written down, which an operation that fills would not be part of.
    """
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made: Tensor = real(*size, **options)
        written_down = _get_current_dispatch_mode() is not None
        if type(made) is Tensor and made.device.type != "meta" and made.numel() and not written_down:
            made.view(-1).view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def no_flag_is_left() -> Iterator[None]:
    """Sizes that fit set no flag."""
    check_errors()
    yield
    check_errors()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For what is counted or timed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Problem:
    """One operand: x, its sizes [G] (None: stacked matrices), and the arguments that its spec needs."""

    x: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any] | None
    spec: QuantizerSpec
    given: dict[str, Any] = field(default_factory=dict)

    def tensor(self, device: str = "cpu") -> Tensor:
        """x as a tensor."""
        made: Tensor = BRIDGE.from_numpy(self.x, device)
        return made

    def group_sizes(self, device: str = "cpu") -> Tensor | None:
        """The sizes as a tensor."""
        return None if self.sizes is None else torch.from_numpy(self.sizes).to(device)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Seed, operand, group offset and scales for this package's functions."""
        return {
            name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
            for name, value in self.given.items()
        }

    def expected(self) -> octavo_numerics.QuantizedArray:
        """What the definition makes of it."""
        return octavo_numerics.quantize(self.x, self.spec, self.sizes, **self.given)

    def __str__(self) -> str:
        sizes = None if self.sizes is None else self.sizes.tolist()
        return f"x {self.x.dtype} {list(self.x.shape)}, sizes {sizes}"


Draw = Callable[..., Problem]


@pytest.fixture
def problem(rng: np.random.Generator) -> Draw:
    """problem(spec): rows of mixed kinds of values in ragged groups, empty ones and a NaN tail among them.

    stacked=True: matrices; kinds: names of octavo_conformance's value classes.
    """

    def make(
        spec: QuantizerSpec,
        *,
        dtype: str = "float32",
        stacked: bool = False,
        rows: int = 300,
        columns: int | None = None,
        groups: int = 5,
        kinds: tuple[str, ...] = tuple(CLASSES),
    ) -> Problem:
        if columns is None:
            columns = int(rng.choice([1, 15, 16, 40, 130, 160, 272]))
        sizes = None
        if stacked:
            x = draw(rng, (groups, rows, columns), dtype)  # type: ignore[arg-type]
            for matrix, kind in zip(x, rng.choice(kinds, groups), strict=True):
                matrix[:] = draw(rng, matrix.shape, dtype, str(kind), spec.format)  # type: ignore[arg-type]
        else:
            sizes = draw_sizes(rng, groups, rows).astype(np.int64)
            x = draw_mixed(rng, sizes, rows, columns, dtype, spec.format, kinds)  # type: ignore[arg-type]
            x[int(sizes.sum()) :] = np.nan
        given: dict[str, Any] = {}
        if spec.stochastic:
            given = {
                "seed": int(rng.integers(0, 1 << 63)) * int(rng.choice([-1, 1])),
                "operand": str(rng.choice(["x", "w", "dy"])),
                "group_offset": int(rng.integers(0, 1 << 20)),
            }
        if spec.scaling == "delayed":
            given["scale"] = np.ldexp(rng.random(groups) + 0.5, rng.integers(-20, 20, groups)).astype(np.float32)
        return Problem(x, sizes, spec, given)

    return make


Same = Callable[..., None]


@pytest.fixture
def same() -> Same:
    """same(q, expected, what): every plane's valid part is the definition's, byte for byte, whatever q's layouts."""

    def check(q: GroupedTensor, expected: octavo_numerics.QuantizedArray, what: object = "") -> None:
        plain = native.convert(q, ("plain", "plain"))
        spec = GroupedTensorSpec(**dict(plain.spec))
        assert spec == expected.spec, what
        arrays = {
            name: None if getattr(plain, name) is None else BRIDGE.to_numpy(getattr(plain, name)) for name in PLANES
        }
        got = octavo_numerics.valid(
            octavo_numerics.QuantizedArray(spec=expected.spec, group_sizes=expected.group_sizes, **arrays)
        )
        want = octavo_numerics.valid(expected)
        assert got.keys() == want.keys(), what
        for name, plane in want.items():
            assert got[name].dtype == plane.dtype, f"{what}: {name}"
            assert got[name].shape == plane.shape, f"{what}: {name}"
            wrong = np.flatnonzero(got[name].view(np.uint8).ravel() != plane.view(np.uint8).ravel())
            assert not len(wrong), f"{what}: {name} differs in {len(wrong)} bytes, first at {wrong[0]}"

    return check
