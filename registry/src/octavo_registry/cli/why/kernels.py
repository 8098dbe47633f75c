"""The tables of `octavo why --kernels`: what each GEMM's backend chooses from, and what its model expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import octavo_registry
from octavo import NoBackendError
from octavo_registry.cli.output import print_line, print_table
from octavo_registry.contract.backend import KernelChoice
from octavo_registry.contract.request import GemmRequest

_HEADER = ("kernel", "tiles", "waves", "filled", "predicted us", "chosen")


@dataclass(frozen=True, slots=True)
class Kernels:
    """One GEMM's answer.

    backend   that serves it; "" where nothing does
    choices   None where the backend has no model
    """

    gemm: str
    backend: str
    rows: int
    choices: tuple[KernelChoice, ...] | None

    @property
    def title(self) -> str:
        """Such as `fprop by torch-native, 8192 rows`."""
        return f"{self.gemm} by {self.backend}, {self.rows} rows in equal groups"

    @property
    def absence(self) -> str:
        """Why there is no table; "" where there is one."""
        if not self.backend:
            return f"{self.gemm}: nothing serves it, so there are no kernels to choose from"
        if self.choices is None:
            return f"{self.gemm}: {self.backend} names no kernels; only a backend with a `kernels` method does"
        if not self.choices:
            return f"{self.gemm}: {self.backend} has no kernels to choose from for this device and recipe"
        return ""


def ask(requests: Mapping[str, GemmRequest], rows: int, backend: Sequence[str] | None) -> list[Kernels]:
    """One answer per GEMM, by its name."""
    answers = []
    for gemm, request in requests.items():
        try:
            name, choices = octavo_registry.kernel_choices(request, rows=rows, backend=backend)
        except NoBackendError:
            name, choices = "", None
        answers.append(Kernels(gemm, name, rows, choices))
    return answers


def kernels_json(answers: Sequence[Kernels]) -> list[dict[str, Any]]:
    """The answers as JSON; `choices` is null where the backend has no model."""
    return [
        {
            "gemm": one.gemm,
            "backend": one.backend or None,
            "rows": one.rows,
            "choices": None if one.choices is None else [asdict(choice) for choice in one.choices],
        }
        for one in answers
    ]


def show_kernels(answers: Sequence[Kernels]) -> None:
    """A table for each GEMM, or the line that says why there is none."""
    for one in answers:
        print_line()
        if one.absence:
            print_line(one.absence)
            continue
        print_table(one.title, _HEADER, [_cells(choice) for choice in one.choices or ()])


def _cells(choice: KernelChoice) -> tuple[str, ...]:
    return (
        choice.name,
        str(choice.tiles),
        f"{choice.waves:.2f}",
        f"{choice.filled:.1%}",
        f"{choice.microseconds:.1f}",
        "chosen" if choice.chosen else "",
    )
