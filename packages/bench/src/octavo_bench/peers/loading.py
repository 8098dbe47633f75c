"""Packages of other libraries that may be absent, or of a version that lacks what is timed: a note with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from octavo_bench.errors import AbsentError
from octavo_bench.harness.results import in_one_line


def loaded(library: str, module: str, names: Sequence[str] = ()) -> Any:
    """The module that `library` is timed through; AbsentError where it does not load or lacks one of `names`."""
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise AbsentError(f"{library} is not measured: it is not installed ({error})") from None
    except Exception as error:  # a binary package may fail in many ways when it loads
        raise AbsentError(f"{library} is not measured: it does not load: {in_one_line(error)}") from None
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        version = getattr(found, "__version__", "of an unknown version")
        raise AbsentError(f"{library} is not measured: {module} {version} has no {', '.join(missing)}")
    return found


def loaded_sonic_moe() -> tuple[Any, str]:
    """`octavo_bench.peers.sonic_moe`, and over which configurations it is tuned; AbsentError where it cannot run."""
    sonic = loaded("SonicMoE", f"{__package__}.sonic_moe")
    try:
        return sonic, sonic.tune_over_few()
    except Exception as error:  # the tuners are not SonicMoE's public interface
        raise AbsentError(f"SonicMoE is not measured: its tuners cannot be limited: {in_one_line(error)}") from None
