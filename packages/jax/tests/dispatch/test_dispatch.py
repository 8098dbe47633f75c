"""Through the registry like anyone's: re-tracing on another preference, cheap warmed calls, light imports."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_registry
from octavo_jax.dispatch.device import device_of
from octavo_jax.linear.autograd import octavo_grouped_dense
from octavo_jax.plugin import CARD
from octavo_registry import BackendCard, Bound, Capability, Request, hookimpl

X, KERNEL = np.ones((8, 16), np.float32), np.ones((2, 16, 4), np.float32)


class _Halves:
    """A second backend, whose fprop is wrong on purpose so that results tell who ran."""

    def __init__(self) -> None:
        self.card = BackendCard(
            name="halves",
            api_level=4,
            priority=-200,
            capabilities=(
                Capability(
                    ops=frozenset({"fprop"}),
                    recipes=frozenset({"high_precision"}),
                    framework="jax",
                    device=device_of(X).kind,
                ),
            ),
        )

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (self.card,)

    @hookimpl
    def octavo_load(self, name: str) -> _Halves | None:
        return self if name == "halves" else None

    def refuses(self, request: Request) -> str | None:
        return None

    def bind(self, request: Request) -> Bound:
        return Bound(lambda x, w, group_sizes, **_: jnp.full((x.shape[0], w.shape[1]), 0.5, x.dtype))


@pytest.fixture
def halves() -> Any:
    """The second backend, registered for one test."""
    octavo_registry.register(_Halves(), "halves")
    yield
    octavo_registry.unregister("halves")


def test_a_jitted_function_follows_the_preference(halves: None) -> None:
    """`prefer` makes a jitted function trace again, once, and leaving the block brings the first program back."""
    traces = []

    @jax.jit
    def run(x: Any, kernel: Any) -> Any:
        traces.append(1)
        return octavo_jax.grouped_dense(x, kernel, [3, 5], recipe=None)

    assert float(run(X, KERNEL)[0, 0]) == 16
    for _ in range(2):
        with octavo_registry.prefer("halves", "*"):
            assert float(run(X, KERNEL)[0, 0]) == 0.5
            assert float(octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=None)[0, 0]) == 0.5
        assert float(run(X, KERNEL)[0, 0]) == 16
    assert len(traces) == 2
    assert float(octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=None, backend=["halves", "*"])[0, 0]) == 0.5


def test_a_preference_stays_in_its_thread(halves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that plans while another one is planning under `prefer` does not find the other's plan in its own."""

    def first_element(rows: int) -> float:
        return float(octavo_jax.grouped_dense(X[:rows], KERNEL[:, :, :rows], [rows, 0], recipe=None)[0, 0])

    def bind(halves: _Halves, request: Request) -> Bound:
        assert threads.submit(first_element, 2).result() == 16  # of another shape
        return bound(halves, request)

    bound = _Halves.bind
    monkeypatch.setattr(_Halves, "bind", bind)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(first_element, 2).result() == 16
        with octavo_registry.prefer("halves", "*"):
            assert first_element(3) == 0.5
        assert first_element(3) == threads.submit(first_element, 3).result() == 16


@pytest.mark.parametrize("jitted", [True, False])
def test_warmed_calls_meet_no_slow_module(jitted: bool) -> None:
    """No frame of pydantic, pluggy, inspect or os in 200 warmed calls, jitted or eager."""
    recipe = octavo.recipe("mxfp8")
    x, kernel, sizes = jnp.asarray(X), jnp.asarray(KERNEL), jnp.array([3, 5])

    def call(x: Any, kernel: Any, sizes: Any) -> Any:
        return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe)

    run = jax.jit(call) if jitted else call
    for _ in range(3):
        run(x, kernel, sizes)
    seen: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_globals.get("__name__", "").partition(".")[0])

    sys.setprofile(profile)
    try:
        for _ in range(200):
            run(x, kernel, sizes)
    finally:
        sys.setprofile(None)
    assert not seen & {"pydantic", "pydantic_core", "pluggy", "inspect", "os"}


PROBE = """
import os
reads = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)
import jax, jax.numpy, jax.ad_checkpoint
os.environ.__class__ = Watched
import octavo_jax, octavo_jax.plugin_api
import sys
assert not [name for name in sys.modules if "octavo_jax.reference" in name], "plugins share no backend"
import octavo_jax.bridge, octavo_jax.reference.backend
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing started a backend"
assert not [key for key in reads if key.startswith("OCTAVO")], reads
assert not any(name.partition(".")[0] in ("flax", "torch", "octavo_numerics") for name in sys.modules)
assert [octavo_jax.linen.MoE.__name__, octavo_jax.nnx.MoE.__name__] == ["MoE"] * 2  # attributes, as flax's own
"""


def test_imports_are_light() -> None:
    """Importing octavo_jax starts no backend, reads no variable of ours, and imports neither Flax nor torch. The door
    to packages of kernels imports no backend, and modules of Flax are attributes that nobody has to import."""
    subprocess.run([sys.executable, "-c", PROBE], check=True, env=os.environ | {"OCTAVO_BACKEND": "nothing"})


def test_equal_recipes_share_one_compilation() -> None:
    """A recipe that is made anew for each call finds the program of the first."""
    programs: Any = octavo_grouped_dense._cache_size  # type: ignore[attr-defined]
    for _ in range(3):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=octavo.MXFP8(output_dtype="float16"))
    before = programs()
    for _ in range(3):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=octavo.MXFP8(output_dtype="float16"))
    assert programs() == before


def test_the_card_tells_the_truth() -> None:
    """Every operation of every recipe that the card declares binds."""
    for capability in CARD.capabilities:
        assert capability.recipes >= {recipe.computed_as.kind for recipe in octavo.PRESETS.values()}
    assert CARD.priority == -100
