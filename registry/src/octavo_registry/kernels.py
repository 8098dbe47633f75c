"""The path of API level 4 to `octavo_registry.contract.backend`."""

from octavo_registry.contract.backend import Backend as KernelModel
from octavo_registry.contract.backend import KernelChoice

__all__ = ["KernelChoice", "KernelModel"]
