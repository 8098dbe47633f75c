"""What the commands of `octavo bench` share: options that are checked before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.errors import InputError
from octavo_bench.harness.recipes import KINDS

FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "octavo_torch"),
    "jax": ("jax", "octavo_jax"),
}
"""What each framework's benchmarks import."""

Framework = Annotated[str, typer.Option(help="torch or jax.")]
Device = Annotated[
    str | None, typer.Option(help="cuda or cpu.", show_default="cuda where the framework sees a GPU, else cpu")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(metavar="G,K,N,M", help="Your own shape; repeat for more.", show_default="published models'"),
]
TokenChoices = Annotated[
    int | None, typer.Option(help="Experts a token; M / choices tokens.", show_default="8 (cpu 2)")
]
Ops = Annotated[str, typer.Option(help="fprop, dgrad, wgrad, with commas.", show_default="all")]
Kinds = Annotated[str, typer.Option(help=f"{', '.join(KINDS)}, with commas.", show_default="all")]
Sizes = Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both with a comma.")]
Backend = Annotated[
    str | None,
    typer.Option(
        help="Names of backends, best first, with commas.", show_default="native on cuda, else the registry's"
    ),
]
Repeats = Annotated[
    int | None, typer.Option(help="Timed calls of each row; the median counts.", show_default="by device")
]
Seed = Annotated[int | None, typer.Option(help="Of data and skewed sizes.", show_default="new, printed")]
Output = Annotated[Path | None, typer.Option(help="JSON file to write.", show_default="none")]
Quiet = Annotated[bool, typer.Option("--json", help="Print what the file holds; progress goes nowhere.")]

LAYER_REPEATS = {("cuda", False): 15, ("cuda", True): 6, ("cpu", False): 2, ("cpu", True): 1}
"""Timed calls of whole layers, by device and `--quick`."""

_MOST_SEED = 2**31


def recorded_command(arguments: Sequence[str]) -> str:
    """The command line as a result file quotes it: without the folders of one machine that `--output` names.

    arguments   after the program's name
    """
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--output":
            kept.append(Path(argument).name)
        elif argument.startswith("--output="):
            kept.append(f"--output={Path(argument.removeprefix('--output=')).name}")
        else:
            kept.append(argument)
    return shlex.join(["octavo", *kept])


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """`value`; `InputError` where it is none of `allowed`."""
    if value not in allowed:
        raise InputError(f"{option} is {value!r}; it is {' or '.join(allowed)}")
    return value


def names_of(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names of `a,b`, each once, or all that are allowed for ""; `InputError` for others."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in allowed:
            raise InputError(f"{option} names {name!r}; known names are {', '.join(allowed)}")
        if names.count(name) > 1:
            raise InputError(f"{option} names {name!r} twice; give each once")
    return tuple(names) or tuple(allowed)


def gemms_of(ops: str) -> tuple[Gemm, ...]:
    """The GEMMs of `--ops`, in the order of a training step."""
    wanted = names_of("--ops", ops, GEMMS)
    return tuple(gemm for gemm in GEMMS if gemm in wanted)


def seed_of(seed: int | None) -> int:
    """The seed, or a new one."""
    if seed is not None and not 0 <= seed < _MOST_SEED:
        raise InputError(f"--seed is {seed}; it is 0 to 2^31 - 1")
    return secrets.randbits(31) if seed is None else seed


def backend_of(text: str | None, framework: str, device: str) -> tuple[str, ...] | None:
    """The closed preference of `a,b`; without one the native kernels on a GPU, where a reference would take hours."""
    if text is None:
        return (f"{framework}-native",) if device == "cuda" else None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_framework(name: str) -> None:
    """`InputError` for an unknown framework."""
    one_of("--framework", name, tuple(FRAMEWORKS))


def frameworks_of(text: str) -> tuple[str, ...]:
    """The frameworks of `torch,jax`, in this order; `InputError` for others."""
    wanted = names_of("--framework", text, tuple(FRAMEWORKS))
    return tuple(name for name in FRAMEWORKS if name in wanted)


def device_of_all(command: str, frameworks: Sequence[str], wanted: str | None) -> str:
    """`device_of` for each; `InputError` where they would not run on one device."""
    if len(frameworks) > 1:
        # else JAX takes three quarters of the GPU's memory when it starts, and torch has the rest
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    places = {name: device_of(command, name, wanted) for name in frameworks}
    if len(set(places.values())) > 1:
        told = ", ".join(f"{name} {place}" for name, place in places.items())
        raise InputError(f"--framework names several and they see different devices ({told}); add --device cpu")
    return places[frameworks[0]]


def device_of(command: str, framework: str, wanted: str | None) -> str:
    """The device to run on; `InputError` where the framework is not installed or sees no GPU that was asked for."""
    if wanted is not None:
        one_of("--device", wanted, ("cpu", "cuda"))
    check_installed(command, FRAMEWORKS[framework], framework)
    usable = wanted != "cpu" and _sees_cuda(framework)
    if wanted == "cuda" and not usable:
        raise InputError(f"--device is cuda and {framework} sees no CUDA device here; use --device cpu")
    return wanted or ("cuda" if usable else "cpu")


def _sees_cuda(framework: str) -> bool:
    if framework == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    from octavo_jax.dispatch.devices import device_kind

    return any(device_kind(device)[0] == "cuda" for device in jax.devices())


def check_installed(command: str, modules: Sequence[str], extra: str) -> None:
    """`InputError` with the line that installs what is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise InputError(f'bench {command} needs {names}, not installed here; pip install "octavo[{extra}]"')
