"""The one door that octavo_jax opens to packages of kernels."""

from __future__ import annotations

import re

from octavo_jax import plugin_api


def test_every_name_is_documented_and_there() -> None:
    """Whoever writes a backend reads one page: the module's docstring names exactly what may be imported."""
    named = set(re.findall(r"`(\w+)`", str(plugin_api.__doc__)))
    assert named == set(plugin_api.__all__)
    assert all(hasattr(plugin_api, name) for name in plugin_api.__all__)
