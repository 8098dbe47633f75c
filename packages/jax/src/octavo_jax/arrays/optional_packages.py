"""What octavo-jax's extras install, named where it is absent."""

from __future__ import annotations


def absent(error: ModuleNotFoundError, package: str, needed_by: str) -> ModuleNotFoundError:
    """What to raise in place of `error`: how to install `package`; `error` itself where it is about another one."""
    if error.name != package:
        return error
    return ModuleNotFoundError(
        f"{needed_by} needs {package}, which is not installed; pip install 'octavo-jax[{package}]'", name=package
    )
