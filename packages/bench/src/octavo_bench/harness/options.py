"""Options of the commands: what the user wrote, checked, and what follows from it.

A benchmark's options are a dataclass whose annotated fields are its command line. Importing this module imports neither
numpy nor a framework.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import typer

from octavo.errors import one_of
from octavo.formats import DType
from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.errors import InputError
from octavo_bench.harness.checks import check_counts, check_installed, names_of
from octavo_bench.harness.recipes import KINDS, names_of_recipes
from octavo_bench.harness.shapes import SIZES, Shape, parse_shapes

FRAMEWORKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"torch": ("torch", "octavo_torch"), "jax": ("jax", "octavo_jax")}
)
"""What each framework's benchmarks import."""

Names = str | Sequence[str] | None
"""A preference of backends."""

Repeats = Mapping[tuple[str, bool], int]
"""Timed calls of each row, by device and `--quick`."""

LAYER_REPEATS: Repeats = MappingProxyType({("cuda", False): 15, ("cuda", True): 6, ("cpu", False): 2, ("cpu", True): 1})

_RECIPES = f"{', '.join(KINDS)}, or presets (`octavo recipes list`), with commas."
Kinds = Annotated[str, typer.Option("--recipes", "--kinds", help=_RECIPES, show_default="all")]
SomeKinds = Annotated[str, typer.Option("--recipes", "--kinds", help=_RECIPES)]
Sizes = Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both with a comma.")]
Ops = Annotated[str, typer.Option(help="fprop, dgrad, wgrad, with commas.", show_default="all")]
ExpertShapes = Annotated[
    list[str] | None,
    typer.Option(metavar="G,K,F,M", help="Your own experts; repeat for more.", show_default="published models'"),
]
TokenChoices = Annotated[
    int | None, typer.Option(help="Experts per token; M / choices tokens.", show_default="8 (cpu 2)")
]

_MOST_SEED = 2**31


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every command has.

    command             the name of the command
    framework_names     the frameworks in which it runs
    default_repeats     timed calls of each row where --repeats is not given, by device and `--quick`
    """

    command: ClassVar[str]
    framework_names: ClassVar[tuple[str, ...]] = ("torch",)
    default_repeats: ClassVar[Repeats] = LAYER_REPEATS

    device: Annotated[
        str | None, typer.Option(help="cuda or cpu.", show_default="cuda where the framework sees a GPU, else cpu")
    ] = None
    repeats: Annotated[
        int | None, typer.Option(help="Timed calls of each row; the median counts.", show_default="by device")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data and of skewed sizes.", show_default="new, printed")
    ] = None
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default="none")] = None
    goals: Annotated[
        Path | None, typer.Option(help="TOML file of goals to compare rows with.", show_default="none")
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, few repeats: seconds.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print what the file holds; progress goes nowhere.")] = False

    def check(self) -> None:
        """`InputError` for what is wrong, before anything heavy is imported."""
        check_counts(repeats=self.repeats)
        if self.device is not None:
            one_of("--device", self.device, ("cpu", "cuda"), InputError)
        if self.seed is not None and not 0 <= self.seed < _MOST_SEED:
            raise InputError(f"--seed is {self.seed}; it is 0 to 2^31 - 1")

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """The frameworks to run in."""
        return self.framework_names

    @cached_property
    def chosen_device(self) -> str:
        """The device to run on; `InputError` where a framework is not installed or sees no GPU that was asked for."""
        return device_of_all(self.command, self.chosen_frameworks, self.device)

    @cached_property
    def chosen_seed(self) -> int:
        """The seed, or a new one."""
        return secrets.randbits(31) if self.seed is None else self.seed

    @property
    def chosen_repeats(self) -> int:
        """Timed calls of each row."""
        return self.repeats or self.default_repeats[self.chosen_device, self.quick]

    @property
    def chosen_dtype(self) -> DType:
        """The dtype of the operands."""
        return "bfloat16"

    @property
    def rows_per_problem(self) -> int:
        """About how many rows are measured for one shape and vector of sizes; estimates of the time left use it."""
        return 1


@dataclass(frozen=True, kw_only=True)
class LayerOptions(Options):
    """Options of benchmarks of layers of some shapes in some kinds of recipe.

    small             the shapes that a CPU runs unless the user gives some
    published         those of a GPU
    published_quick   those of a GPU in a quick run; empty for the same ones
    """

    small: ClassVar[tuple[Shape, ...]]
    published: ClassVar[tuple[Shape, ...]]
    published_quick: ClassVar[tuple[Shape, ...]] = ()

    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="G,K,N,M", help="Your own shape; repeat for more.", show_default="published models'"),
    ] = None
    kinds: Kinds = ""

    def check(self) -> None:
        """See `Options`; kinds and shapes too."""
        super().check()
        names_of_recipes("--recipes", self.kinds)
        parse_shapes(self.shape or [])

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        """The kinds to run."""
        return names_of_recipes("--recipes", self.kinds)

    @property
    def rows_per_problem(self) -> int:
        """One for each recipe."""
        return len(self.chosen_kinds)

    @property
    def chosen_shapes(self) -> tuple[Shape, ...]:
        """The user's shapes, or the default ones of the device."""
        own = parse_shapes(self.shape or [])
        if own or self.chosen_device == "cpu":
            return own or self.small
        return self.published_quick or self.published if self.quick else self.published


@dataclass(frozen=True, kw_only=True)
class SizesOption(LayerOptions):
    """Options of layers whose groups may be even or skewed."""

    sizes: Sizes = "even"

    def check(self) -> None:
        """See `Options`; sizes too."""
        super().check()
        names_of("--sizes", self.sizes, SIZES)

    @property
    def chosen_sizes(self) -> tuple[str, ...]:
        """Which vectors of group sizes each shape is run with."""
        return names_of("--sizes", self.sizes, SIZES)


@dataclass(frozen=True, kw_only=True)
class BackendOption(LayerOptions):
    """Options of layers that a backend of the user's choice serves."""

    backend: Annotated[
        str | None,
        typer.Option(
            help="Names of backends, best first, with commas.", show_default="native on cuda, else the registry's"
        ),
    ] = None

    def check(self) -> None:
        """See `Options`; and `UnknownBackendError` for a backend that there is not, before its peers are timed."""
        super().check()
        if self.backend is not None:
            import octavo_registry as registry

            registry.check_backend(self._named)

    @property
    def _named(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self.backend or "").split(",") if part.strip())

    @property
    def chosen_backend(self) -> Names:
        """The preference for the first framework."""
        return self.backend_in(self.chosen_frameworks[0])

    def backend_in(self, framework: str) -> Names:
        """The closed preference of `a,b`; without one native kernels on a GPU, where a reference would take hours."""
        if self.backend is None:
            return (f"{framework}-native",) if self.chosen_device == "cuda" else None
        return self._named


def gemms_of(ops: str) -> tuple[Gemm, ...]:
    """The GEMMs of `--ops`, in the order of a training step; `InputError` for other names."""
    names = names_of("--ops", ops, GEMMS)
    return tuple(gemm for gemm in GEMMS if gemm in names)


def device_of_all(command: str, frameworks: Sequence[str], device: str | None) -> str:
    """The device that these frameworks run on, `device` or the best that they see.

    Raises `InputError` where one is not installed or sees no GPU that was asked for, or where they see different ones.
    """
    if len(frameworks) > 1:
        # else JAX takes three quarters of the GPU's memory when it starts, and torch has the rest
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    places = {name: _device_of(command, name, device) for name in frameworks}
    if len(set(places.values())) > 1:
        seen = ", ".join(f"{name} {place}" for name, place in places.items())
        raise InputError(f"--framework names several and they see different devices ({seen}); add --device cpu")
    return places[frameworks[0]]


def _device_of(command: str, framework: str, device: str | None) -> str:
    check_installed(command, FRAMEWORKS[framework], f"octavo-{framework}")
    if device == "cpu":
        return "cpu"
    import octavo_registry as registry

    usable = any(seen.kind == "cuda" for seen in registry.framework(framework).devices())
    if device == "cuda" and not usable:
        raise InputError(f"--device is cuda and {framework} sees no CUDA device here; use --device cpu")
    return "cuda" if usable else "cpu"
