"""Octavo's native kernels for JAX, through XLA's FFI: the backend "jax-native".

There is nothing to call here: where this package is installed, the registry chooses it for the functions of octavo_jax.
`TARGETS` names its custom calls, for `jax.export`. Importing this package imports neither JAX nor the kernels; the
first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_jax_native.ffi.targets import TARGETS

__version__ = "0.2.0"

__all__ = ["TARGETS"]


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from octavo_jax_native.ffi.targets import TARGETS

        return TARGETS


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
