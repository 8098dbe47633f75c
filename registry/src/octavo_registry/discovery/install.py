"""How to install a package of Octavo's own: from a clone, as no index has them yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from types import MappingProxyType

from octavo_registry.contract.cards import MOVES, OPTIMIZERS, QUANTIZERS, ROUTERS, Op
from octavo_registry.discovery.names import FRONT_ENDS, RESERVED

_BASE = ("octavo-core", "octavo-registry")
_TORCH, _JAX = (*_BASE, "octavo-torch"), (*_BASE, "octavo-jax")

PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "octavo-core": ("packages/core", ()),
        "octavo-numerics": ("packages/numerics", ("octavo-core",)),
        "octavo-registry": ("registry", ("octavo-core",)),
        "octavo-native": ("native", ()),
        "octavo-triton": ("packages/triton", ("octavo-core",)),
        "octavo-torch": ("packages/torch", _BASE),
        "octavo-torch-native": ("packages/torch-native", (*_TORCH, "octavo-native")),
        "octavo-torch-cudagraph": ("packages/torch-cudagraph", (*_TORCH, "octavo-native", "octavo-torch-native")),
        "octavo-torch-triton": ("packages/torch-triton", (*_TORCH, "octavo-triton")),
        "octavo-jax": ("packages/jax", _BASE),
        "octavo-jax-native": ("packages/jax-native", (*_JAX, "octavo-native")),
        "octavo-jax-triton": ("packages/jax-triton", (*_JAX, "octavo-triton")),
        "octavo-conformance": ("packages/conformance", (*_BASE, "octavo-numerics")),
        "octavo-bench": ("packages/bench", (*_BASE, "octavo-numerics")),
        "octavo": ("packages/cli", (*_BASE, "octavo-numerics")),
    }
)
"""Each distribution's folder in the repository, and those of Octavo's that it needs."""

_FUSED = QUANTIZERS - {"quantize"}
LACKING: Mapping[tuple[str, str], frozenset[Op]] = MappingProxyType(
    {
        ("octavo-torch-native", "cpu"): OPTIMIZERS,
        ("octavo-torch-native", "cuda"): frozenset(),
        ("octavo-jax-native", "cpu"): OPTIMIZERS,
        ("octavo-jax-native", "cuda"): OPTIMIZERS,
        ("octavo-torch-triton", "cuda"): _FUSED | ROUTERS | OPTIMIZERS | {"route"},
        ("octavo-jax-triton", "cuda"): _FUSED | ROUTERS | OPTIMIZERS | MOVES,
    }
)
"""Operations that a package with kernels for a device has none for: to install it would not help them."""


def how_to_install(distribution: str) -> str:
    """What a user does to have `distribution` of Octavo's: a command, and where it runs.

    The command has the folders of what that needs and is not installed, too: pip would look for these on an index.
    """
    if distribution not in PACKAGES:
        return f"pip install {distribution}"
    own = PACKAGES[distribution][0]
    folders = [PACKAGES[name][0] for name in PACKAGES[distribution][1] if installed_version(name) is None]
    return "in a clone of Octavo run: pip install " + " ".join(f"./{folder}" for folder in _ordered([*folders, own]))


def kernels_for(framework: str, device: str, arch: tuple[int, int] | None) -> tuple[str, str] | None:
    """Octavo's distribution with kernels for a device and what they are, or None where there are none."""
    if framework not in FRONT_ENDS:
        return None
    if device == "cpu" or (device == "cuda" and arch == (9, 0)):
        return f"octavo-{framework}-native", "compiled kernels for this device"
    if device == "cuda" and arch is not None and arch[0] in (8, 10, 12):  # what octavo-triton is compiled for
        python = ", on Python 3.12 and newer" if framework == "jax" else ""
        return f"octavo-{framework}-triton", f"kernels in Triton for this device{python}, not yet run on one"
    return None


def what_is_missing(
    framework: str,
    device: str,
    arch: tuple[int, int] | None,
    serving: str | None,
    *,
    any_backend: bool,
    op: Op = "fprop",
) -> str:
    """A sentence on a package that would help where a reference backend serves, or nothing does; "" for others.

    serving      the backend that serves, or None
    any_backend  whether a backend for the framework is installed
    op           what is asked about
    """
    front_end = FRONT_ENDS.get(framework)
    if front_end is None or (serving is not None and RESERVED.get(serving) != front_end):
        return ""
    if not any_backend:
        return f"No backend for {framework} is installed; {how_to_install(front_end)}"
    found = kernels_for(framework, device, arch)
    if found is None or op in LACKING[found[0], device] or installed_version(found[0]) is not None:
        return ""
    slow = "" if serving is None else f"{serving} is exact and slow. "
    return f"{slow}{found[0]} has {found[1]}, and is not installed; {how_to_install(found[0])}"


def _ordered(folders: list[str]) -> Iterator[str]:
    """In the table's order, as documents have them."""
    return (folder for folder, _ in PACKAGES.values() if folder in folders)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
