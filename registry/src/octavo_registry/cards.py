"""The path of API level 4 to `octavo_registry.contract.cards`."""

from octavo_registry.contract.cards import (
    ALL_ACTIVATIONS,
    ALL_DTYPES,
    ALL_NORMS,
    GATED,
    MOVES,
    QUANTIZERS,
    Accumulation,
    Activation,
    Arch,
    BackendCard,
    Capability,
    Name,
    Norm,
    Op,
    QuantizerCard,
    Weight,
)

__all__ = [
    "ALL_ACTIVATIONS",
    "ALL_DTYPES",
    "ALL_NORMS",
    "GATED",
    "MOVES",
    "QUANTIZERS",
    "Accumulation",
    "Activation",
    "Arch",
    "BackendCard",
    "Capability",
    "Name",
    "Norm",
    "Op",
    "QuantizerCard",
    "Weight",
]
