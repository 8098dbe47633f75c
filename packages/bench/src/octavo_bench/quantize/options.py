"""What `octavo bench quantize` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, ClassVar

import typer

from octavo.formats import DType
from octavo_bench.errors import InputError
from octavo_bench.harness.checks import check_counts, check_installed
from octavo_bench.harness.options import Options, Repeats, device_of_all
from octavo_bench.quantize.case import Case, chosen_cases

_DTYPES: dict[str, DType] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHAPES = {
    ("cuda", False): "32768x7168,65536x4096",
    ("cuda", True): "32768x7168",
    ("cpu", False): "2048x2048",
    ("cpu", True): "1024x1024",
}
_NEEDED = ("torch", "octavo_torch", "octavo_native", "octavo_torch_native")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Options):
    """See the command's help."""

    command: ClassVar[str] = "quantize"
    default_repeats: ClassVar[Repeats] = MappingProxyType(
        {("cuda", False): 50, ("cuda", True): 15, ("cpu", False): 5, ("cpu", True): 3}
    )

    shapes: Annotated[
        str | None, typer.Option(help="ROWSxCOLUMNS, with commas.", show_default=_SHAPES["cuda", False])
    ] = None
    groups: Annotated[int, typer.Option(help="Groups of (nearly) equal size.")] = 8
    ragged_groups: Annotated[
        int, typer.Option(help="Groups of the second table: Dirichlet(0.5) sizes, one of them empty.")
    ] = 128
    recipes: Annotated[
        str, typer.Option(help="delayed, current, row, block, mxfp8, nvfp4, with commas.", show_default="all")
    ] = ""
    dtype: Annotated[str, typer.Option(help="Of the input: bf16, fp16 or fp32.")] = "bf16"
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats, nothing compiled: seconds.")] = False

    def check(self) -> None:
        """See `Options`; what is missing too."""
        chosen_cases(self.recipes)
        check_counts(groups=self.groups, ragged_groups=self.ragged_groups)
        if self.shapes is not None:
            parse_shapes(self.shapes)
        if self.dtype not in _DTYPES:
            raise InputError(f"--dtype is {self.dtype!r}; it is bf16, fp16 or fp32")
        super().check()
        check_installed(self.command, _NEEDED, "torch-native")

    @cached_property
    def chosen_device(self) -> str:
        """The device; a GPU where octavo-native has kernels for it."""
        import octavo_native

        if octavo_native.HAS_CUDA:
            return device_of_all(self.command, self.chosen_frameworks, self.device)
        if self.device == "cuda" and device_of_all(self.command, self.chosen_frameworks, "cuda"):
            raise InputError("--device is cuda and octavo-native was built without CUDA kernels; use --device cpu")
        return "cpu"

    @property
    def chosen_dtype(self) -> DType:
        """Of the input."""
        return _DTYPES[self.dtype]

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is timed."""
        return chosen_cases(self.recipes)

    @property
    def chosen_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns."""
        return parse_shapes(self.shapes or _SHAPES[self.chosen_device, self.quick])


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """(rows, columns) pairs of `32768x7168,65536x4096`; `InputError` says which part does not fit."""
    shapes = []
    for part in (part.strip() for part in text.split(",")):
        sides = part.split("x")
        if len(sides) != 2 or not all(side.isdecimal() for side in sides):
            raise InputError(f"--shapes holds {part!r}; give ROWSxCOLUMNS with commas between, such as 32768x7168")
        rows, cols = int(sides[0]), int(sides[1])
        if not (1 <= rows <= 1 << 30 and 16 <= cols <= 1 << 20 and cols % 16 == 0):
            raise InputError(f"--shapes holds {part!r}; rows are 1 to 2^30, columns a multiple of 16 up to 2^20")
        shapes.append((rows, cols))
    repeated = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if repeated is not None:
        raise InputError(f"--shapes names {repeated[0]}x{repeated[1]} twice; give each shape once")
    return tuple(shapes)
