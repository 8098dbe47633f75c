"""What is run on two places and has to be equal, and what was not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from problems import DTYPES, Place, Plane, Shape, valid
from torch import Tensor


class Comparison:
    """Counts comparisons and keeps what differs."""

    def __init__(self, place: Place, reference: Place, tail: str, share: slice = slice(None)) -> None:
        self.place, self.reference, self.tail, self.share = place, reference, tail, share
        self.equal = 0
        self.faults: list[str] = []
        self.refusals: Counter[str] = Counter()
        self.draw = torch.Generator().manual_seed(20)

    def rows(self, shape: Shape, cols: int, dtype: str, place: Place, values: Tensor, gap: int = 0) -> Tensor:
        """`values` in the used rows of an array on `place`, the tail as `--tail` says; `gap` elements between rows."""
        x = torch.empty(shape.rows, cols + gap, dtype=DTYPES[dtype], device=place.device)[:, :cols]
        x[: shape.used] = values[: shape.used].to(place.device)
        if self.tail == "nan" or not place.cuda:
            x[shape.used :] = torch.nan
        return x

    def values(self, shape: Shape, cols: int, dtype: str) -> Tensor:
        """Normal values of several magnitudes, with zeros and a block of zeros."""
        values = (
            torch.randn(shape.rows, cols, generator=self.draw) * torch.exp2(torch.arange(shape.rows) % 9 - 4.0)[:, None]
        )
        values[shape.rows // 2, : cols // 2] = 0
        return values.to(DTYPES[dtype])

    def same(self, what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Bit for bit, or a fault with the first difference."""
        different = np.flatnonzero(np.ascontiguousarray(ours).reshape(-1) != np.ascontiguousarray(theirs).reshape(-1))
        if not different.size:
            self.equal += 1
            return
        first = int(different[0])
        one, other = (int(np.ascontiguousarray(part).reshape(-1)[first]) for part in (ours, theirs))
        self.faults.append(
            f"{what}: {different.size} of {ours.size} bytes differ, the first is byte {first}: "
            f"{one:#x}, and {other:#x} on one CPU thread"
        )

    def both(self, what: str, run: Any) -> tuple[Any, Any] | None:
        """`run(place)` on both; None where they refuse the arguments. One that refuses alone is a fault."""
        results, errors = [], []
        for place in (self.reference, self.place):
            try:
                results.append(run(place))
            except ValueError as error:
                errors.append(str(error))
        if len(errors) == 1:
            self.faults.append(f"{what}: one device refuses what the other runs: {errors[0]}")
            return None
        if errors:
            self.refusals[errors[0]] += 1
            return None
        return results[1], results[0]

    def planes(self, what: str, spec: dict[str, Any], shape: Shape, ours: list[Plane], theirs: list[Plane]) -> None:
        """Every plane's defined bytes."""
        for one, other in zip(ours, theirs, strict=True):
            names = ("codes", "scales", "factors")
            for name, a, b in zip(names, valid(spec, shape, one), valid(spec, shape, other), strict=False):
                self.same(f"{what} {one.direction} {one.layout} {name}", a, b)

    def summed(self, what: str, shape: Shape, values: Tensor, dbias: Tensor) -> None:
        """fp32 sums of n terms in any order are within n * 2^-24 of the sum of magnitudes."""
        start = 0
        for group, size in enumerate(shape.real):
            rows = values[start : start + size]
            wrong = (dbias.view(len(shape.sizes), -1)[group].double() - rows.sum(0)).abs()
            if (wrong > size * 2.0**-24 * rows.abs().sum(0)).any():
                self.faults.append(f"{what}: dbias of group {group} is off by {wrong.max().item()}")
            start += size
        self.equal += 1
