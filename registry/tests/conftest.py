"""Plugins and installed distributions made up for a test."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import octavo
import octavo_registry
from octavo_registry import API_LEVEL, Capability, Registry, Request
from octavo_registry.contract.backend import AnyBound, Backend
from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.discovery.entry_points import Published, published
from octavo_registry.discovery.loader import GROUP
from octavo_registry.dispatch import preference

GEMMS = frozenset({"fprop", "dgrad", "wgrad"})
FUNCTIONS = tuple(name for name in octavo_registry.__all__ if hasattr(getattr(octavo_registry, name), "__self__"))
"""The functions of `octavo_registry` that are those of the process's registry."""


def bound(op: Any, run: Any = print, **parts: Any) -> Any:
    """An answer in the class of the operation."""
    return OPERATIONS[op].bound(run, **parts)


class FakeBackend(Backend):
    """Counts what is asked of it; `answer` may be a Bound, an exception to raise, or anything else to return."""

    def __init__(self, answer: Any = None, refusal: Any = None, layouts: Mapping[str, str] | None = None) -> None:
        self.answer = answer
        self.refusal = refusal
        self.layouts = layouts or {}
        self.binds: list[Request] = []

    def refuses(self, request: Request) -> str | None:
        if isinstance(self.refusal, BaseException):
            raise self.refusal
        return self.refusal  # type: ignore[no-any-return]

    def bind(self, request: Request) -> AnyBound:
        self.binds.append(request)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is not None:
            return self.answer  # type: ignore[no-any-return]
        return bound(request.op, lambda *a, **k: None, layouts=self.layouts if request.op in GEMMS else {})  # type: ignore[no-any-return]


class FakePlugin:
    """A plugin with one backend; `loads` counts calls of octavo_load."""

    def __init__(self, card: BackendCard, backend: Any) -> None:
        self.card = card
        self.backend = backend
        self.loads = 0

    def octavo_backends(self) -> Iterable[BackendCard]:
        return [self.card]

    def octavo_load(self, name: str) -> Any:
        self.loads += 1
        if isinstance(self.backend, BaseException):
            raise self.backend
        return self.backend if name == self.card.name else None


class _Fakes:
    Backend = FakeBackend
    Plugin = FakePlugin
    bound = staticmethod(bound)

    @staticmethod
    def row(**fields: Any) -> Capability:
        """A row that admits every GEMM and quantizer in mxfp8 and high precision for torch on cpu, unless told."""
        fields.setdefault("ops", {*GEMMS, "quantize"})
        fields.setdefault("recipes", {"mxfp8", "high_precision"})
        return Capability(**{"framework": "torch", "device": "cpu", **fields})

    @classmethod
    def card(cls, name: str = "a", rows: Iterable[Capability] | None = None, **fields: Any) -> BackendCard:
        return BackendCard(
            **{"name": name, "api_level": API_LEVEL, "capabilities": tuple(rows or [cls.row()]), **fields}
        )

    @classmethod
    def plugin(cls, name: str = "a", backend: Any = None, **card: Any) -> FakePlugin:
        return FakePlugin(cls.card(name, **card), FakeBackend() if backend is None else backend)

    @staticmethod
    def request(**fields: Any) -> Request:
        wanted = {
            "op": "fprop",
            "framework": "torch",
            "device": "cpu",
            "in_dtype": "bfloat16",
            "out_dtype": "bfloat16",
            **({"recipe": octavo.MXFP8()} if fields.get("op", "fprop") in GEMMS else {}),
            "k": 64,
            "n": 32,
            "groups": 4,
        }
        return Request(**{**wanted, **fields})

    @classmethod
    def registry(cls, *plugins: FakePlugin) -> Registry:
        return Registry.from_plugins({f"plugin-{p.card.name}": p for p in plugins})


@pytest.fixture
def fakes() -> type[_Fakes]:
    """Cards, plugins, backends and requests with defaults that fit together."""
    return _Fakes


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OCTAVO_BACKEND is read once per process; each test reads it anew, and none inherits the developer's."""
    monkeypatch.delenv(preference.ENVIRONMENT, raising=False)
    monkeypatch.setattr(preference, "_environment", [])


@pytest.fixture
def rng() -> random.Random:
    """Fresh random numbers; the seed is printed, and pytest shows it where the test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(distribution, modules, entry_points): a distribution on sys.path, as pip would leave it there."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules_made: set[str] = set()

    def make(
        distribution: str,
        modules: Mapping[str, str],
        entry_points: Mapping[str, Mapping[str, str]] | str,
        version: str = "1.0",
        summary: str = "",
        requires: Iterable[str] = (),
    ) -> None:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        about = [("Metadata-Version", "2.1"), ("Name", distribution), ("Version", version), ("Summary", summary)]
        about += [("Requires-Dist", need) for need in requires]
        (info / "METADATA").write_text("".join(f"{field}: {value}\n" for field, value in about))
        if not isinstance(entry_points, str):
            entry_points = "\n".join(
                "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
                for group, points in entry_points.items()
            )
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
            modules_made.add(module)
        importlib.invalidate_caches()

    yield make
    for module in modules_made:
        sys.modules.pop(module, None)


@pytest.fixture
def discovered() -> Callable[[], Registry]:
    """discovered(): a registry of what `install` put there, and of nothing else that is installed."""

    def find() -> list[Published]:
        return [entry for entry in published(GROUP) if entry.distribution.startswith("test-")]

    return lambda: Registry(find)


PLUGIN = """
from octavo_registry import BackendCard, Bound, Capability

CARD = BackendCard(
    name="{name}", api_level={api_level}, needs={needs},
    capabilities=(Capability(ops={{"fprop"}}, recipes={{"mxfp8"}}, framework="torch", device="cpu"),),
)

class Backend:
    def refuses(self, request):
        return None

    def bind(self, request):
        return Bound(run=lambda *a, **k: "{name}")

def octavo_backends():
    return [CARD]

def octavo_load(name):
    return Backend()
"""


@pytest.fixture
def source() -> Callable[..., str]:
    """source(name): the source of a small plugin module, whose backend is called `name`."""

    def make(name: str, api_level: int = API_LEVEL, needs: tuple[str, ...] = (), extra: str = "") -> str:
        return PLUGIN.format(name=name, api_level=api_level, needs=needs) + extra

    return make


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Registry], None]:
    """use(registry): `octavo_registry`'s functions are those of this registry, for the length of a test."""

    def use_registry(registry: Registry) -> None:
        for name in FUNCTIONS:
            monkeypatch.setattr(octavo_registry, name, getattr(registry, name))

    return use_registry
