"""BoundReport: what comparing a result with its bound has found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BoundReport:
    """What a comparison found. Ratios are error / bound: at most 1 passes.

    passed     every ratio is at most 1
    t1         the largest ratio of T1 over the elements
    t2         the largest ratio of T2 by "whole", "row", "column", "tile"; those that were not judged are absent
    where      (row, column) of the element with the largest T1 ratio; None for an empty result
    first_bad  (row, column) of the first element that fails T1, or of the first element of what fails T2
    actual, expected, allowed   the values at `first_bad` (else at `where`), and T1's bound there
    """

    passed: bool
    t1: float
    t2: dict[str, float]
    where: tuple[int, int] | None = None
    first_bad: tuple[int, int] | None = None
    actual: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0
    bound: str = field(default="", repr=False)

    def describe(self) -> str:
        """One sentence: the verdict, the element and both values, and every maximum."""
        maxima = ", ".join(f"{name} {ratio:.3g}" for name, ratio in {"T1": self.t1, **self.t2}.items())
        if self.passed:
            return f"within {self.bound}: error/bound maxima {maxima}"
        if self.t1 > 1:
            what = "element"
        else:
            worst = max(self.t2, key=lambda name: self.t2[name])
            what = f"{worst} (norm {self.t2[worst]:.3g} of its bound) from element"
        return (
            f"outside {self.bound}: {what} {self.first_bad} is {self.actual!r}, expected {self.expected!r} "
            f"within {self.allowed:.3g}; error/bound maxima {maxima}"
        )
