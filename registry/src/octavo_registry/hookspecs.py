"""The path of API level 4 to `octavo_registry.contract.hookspecs`."""

from octavo_registry.contract.hookspecs import API_LEVEL, PROJECT, HookSpecs, hookimpl, hookspec

__all__ = [
    "API_LEVEL",
    "PROJECT",
    "HookSpecs",
    "hookimpl",
    "hookspec",
]
