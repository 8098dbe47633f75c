"""Backends that a suite which only skips would pass: one refuses what its card declares, one misspells a recipe."""

from __future__ import annotations

from typing import Any

from octavo_registry.contract import Backend, Refused
from octavo_registry.contract.cards import BackendCard, Capability


def _card(name: str, **fields: Any) -> BackendCard:
    row = Capability(ops=frozenset({"quantize", "fprop", "dgrad"}), framework="numpy", device="cpu", **fields)
    return BackendCard(name=name, api_level=5, capabilities=(row,))


def octavo_backends() -> list[BackendCard]:
    """The two cards, and one of which everything is served."""
    block = frozenset({"block"})
    return [
        _card("numpy-never", recipes=block),
        _card("numpy-narrow", recipes=block, in_dtypes=frozenset({"float16"}), orientations=frozenset({"rowwise"})),
        _card("numpy-misspelt", recipes=frozenset({"blokc"})),
    ]


class Never(Backend):
    """Quantizes; every GEMM is refused when it is bound."""

    def __init__(self) -> None:
        from numpy_backend import NumpyBackend

        self._honest = NumpyBackend()

    def refuses(self, request: Any) -> str | None:
        """None: what the card says is believed until a function is wanted."""
        return None

    def bind(self, request: Any) -> Any:
        """The honest quantizer."""
        if request.op != "quantize":
            raise Refused(f"the library for {request.op} is not linked")
        return self._honest.bind(request)


def octavo_load(name: str) -> object | None:
    """The backend of that name."""
    if name == "numpy-never":
        return Never()
    if name not in ("numpy-narrow", "numpy-misspelt"):
        return None
    from numpy_backend import NumpyBackend

    return NumpyBackend()
