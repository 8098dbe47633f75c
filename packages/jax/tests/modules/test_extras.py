"""What an extra installs is named where it is absent, by whatever needs it."""

from __future__ import annotations

import subprocess
import sys

NEEDED_BY = {
    "octavo_jax.nnx": "flax",
    "octavo_jax.linen": "flax",
    "octavo_jax.optimizers": "optax",
    "octavo_jax.adapters.qwix": "qwix",
}
IMPORT = """
import importlib, sys
from importlib.machinery import PathFinder
hidden, *modules = sys.argv[1:]
class Hides(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in hidden.split(",") else super().find_spec(name, path, target)
sys.meta_path[:] = [Hides if finder is PathFinder else finder for finder in sys.meta_path]
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(error.name, error, sep=": ")
"""


def said_without(packages: set[str], *modules: str) -> list[str]:
    """What importing each of these modules says where no such packages are installed."""
    command = [sys.executable, "-c", IMPORT, ",".join(packages), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_each_says_what_to_install() -> None:
    """The message names the module, the package, and the extra that installs it."""
    assert said_without(set(NEEDED_BY.values()), *NEEDED_BY) == [
        f"{package}: {module} needs {package}, which is not installed; pip install 'octavo-jax[{package}]'"
        for module, package in NEEDED_BY.items()
    ]


def test_what_the_package_itself_lacks_is_named_by_python() -> None:
    """To install the extra would not help there."""
    assert said_without({"absl"}, "octavo_jax.optimizers") == ["absl: No module named 'absl'"]
