"""Routing and moved rows as calls on torch tensors, on either place. Not tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from problems import DTYPES, POISON, Place, address
from torch import Tensor

import octavo_native as native

CASES: tuple[tuple[int, int, int, int], ...] = (
    (0, 3, 16, 2), (1, 1, 1, 1), (37, 3, 20, 5), (200, 8, 264, 17), (129, 2, 1032, 300), (64, 9, 7, 8),
    (12_400, 2, 8, 9),
)  # fmt: skip
"""(tokens, choices, columns, groups)."""


@dataclass(eq=False)
class Routed:
    """group_sizes, order, position and routed of choices [T, k] on one place."""

    place: Place
    index: Tensor
    tensors: list[Tensor]

    @property
    def used(self) -> int:
        """Rows that belong to a group."""
        return int(self.tensors[0].sum())

    def move(self, what: str, given: Tensor, weights: Tensor | None) -> Tensor:
        """permute_rows or combine_rows of rows that may stand apart."""
        tokens, each = self.index.shape
        count = tokens * each if what == "permute_rows" else tokens
        out = poisoned((count, given.shape[1]), given.dtype, self.place)
        rows = out if what == "permute_rows" else given
        getattr(native, what)(
            **self._common(given, rows), weights=address(weights), from_=address(given), stride=given.stride(0),
            out=address(out),
        )  # fmt: skip
        return out

    def dot(self, rows: Tensor, dy: Tensor) -> Tensor:
        """dot_rows."""
        out = poisoned(tuple(self.index.shape), torch.float32, self.place)
        native.dot_rows(
            **self._common(dy, rows), rows=address(rows), row_stride=rows.stride(0), dy=address(dy),
            dy_stride=dy.stride(0), out=address(out),
        )  # fmt: skip
        return out

    def _common(self, like: Tensor, rows: Tensor) -> dict[str, Any]:
        names = {dtype: native.DTYPES[name] for name, dtype in DTYPES.items()}
        return {
            **self.place.common,
            "stream": stream(self.place),
            "tokens": self.index.shape[0],
            "each": self.index.shape[1],
            "row_count": rows.shape[0],
            "position": address(self.tensors[2]),
            "routed": address(self.tensors[3]),
            "dtype": names[like.dtype],
            "cols": like.shape[1],
        }


def stream(place: Place) -> int:
    """The current one of a GPU."""
    return torch.cuda.current_stream().cuda_stream if place.cuda else 0


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Tensor:
    """An array that nobody has written."""
    out = torch.empty(shape, dtype=dtype, device=place.device)
    out.view(-1).view(torch.uint8).fill_(POISON)
    return out


def route(place: Place, index: Tensor, groups: int, *, workspace: bool = True) -> Routed:
    """route of choices [T, k]; with its workspace where it has a use for one."""
    index = index.to(place.device)
    needed = native.route_workspace(index.numel(), groups) if workspace and place.cuda else 0
    counts = poisoned((needed,), torch.uint8, place)
    shapes = ((groups,), (index.numel(),), tuple(index.shape), tuple(index.shape))
    kinds = (torch.int64, torch.int64, torch.int64, torch.uint8)
    made = [poisoned(shape, dtype, place) for shape, dtype in zip(shapes, kinds, strict=True)]
    names = ("group_sizes", "order", "position", "routed")
    native.route(
        cuda=place.cuda, stream=stream(place), index=address(index), choices=index.numel(), groups=groups,
        counts=address(counts) if needed else 0,
        **{name: address(tensor) for name, tensor in zip(names, made, strict=True)},
    )  # fmt: skip
    return Routed(place, index, made)


def draw_index(draw: torch.Generator, tokens: int, each: int, groups: int) -> Tensor:
    """Choices, a quarter of them of no group."""
    index = torch.randint(groups, (tokens, each), generator=draw)
    lost = torch.rand(index.shape, generator=draw) < 0.25
    return torch.where(lost, torch.tensor([-1, groups, -(1 << 63), (1 << 63) - 1])[index % 4], index)


def draw_rows(draw: torch.Generator, count: int, cols: int, dtype: str, gap: int, place: Place) -> Tensor:
    """[count, cols] on `place`, `gap` elements between rows."""
    values = torch.randn(count, cols, generator=draw).to(DTYPES[dtype])
    held = torch.empty(count, cols + gap, dtype=DTYPES[dtype], device=place.device)[:, :cols]
    held.copy_(values)
    return held
