"""The gaps file: what a backend does not do yet, as its authors know.

    [[gap]]
    test = "gemm::test_fprop_is_within_its_bound[*nvfp4*]"   # test id; `*` stands for anything
    kind = "notyet"
    reason = "NVFP4 products come with the next kernel"

    [[gap]]
    backend = "acme"                                          # optional
    capability = { op = "quantize", recipe = "mxfp8", dtype = "float16" }
    kind = "never"
    reason = "fp16 inputs are not planned"

`notimpl` and `notyet` are strict expected failures: the gap must go when the test passes. `never` skips.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["notimpl", "notyet", "never"]
CAPABILITY_KEYS = frozenset({"op", "recipe", "variant", "dtype", "framework", "device"})
_KEYS = frozenset({"test", "capability", "kind", "reason", "backend"})


class GapsError(ValueError):
    """A gaps file that cannot be used; the message names the file, the entry and the fix."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One entry: it applies to a test whose id and capability match all that it names."""

    kind: Kind
    reason: str
    test: str | None = None
    capability: tuple[tuple[str, str], ...] = ()
    backend: str | None = None

    def matches(self, test_id: str, facts: Mapping[str, str]) -> bool:
        """True where this gap is about the test `test_id` of the backend and capability in `facts`."""
        if self.backend is not None and facts.get("backend") != self.backend:
            return False
        if self.test is not None and not re.fullmatch(re.escape(self.test).replace(r"\*", ".*"), test_id):
            return False
        return all(facts.get(key) == value for key, value in self.capability)

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def read_gaps(path: Path) -> tuple[Gap, ...]:
    """The gaps in a TOML file; `GapsError` where it cannot be read or an entry is wrong."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GapsError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GapsError(f"{path}: not TOML ({error})") from None
    entries = content.pop("gap", [])
    if content or not isinstance(entries, list):
        raise GapsError(
            f"{path}: holds {sorted(content) or 'a gap that is not a list'}; write one [[gap]] table per gap"
        )
    return tuple(_gap(f"{path}: gap {index}", entry) for index, entry in enumerate(entries, 1))


def _gap(where: str, entry: object) -> Gap:
    if not isinstance(entry, dict):
        raise GapsError(f"{where}: is {entry!r}; write a [[gap]] table")
    if unknown := sorted(set(entry) - _KEYS):
        raise GapsError(f"{where}: unknown keys {unknown}; known are {sorted(_KEYS)}")
    kind, reason = entry.get("kind"), entry.get("reason")
    if kind != "notimpl" and kind != "notyet" and kind != "never":
        raise GapsError(f"{where}: kind is {kind!r}; write one of {', '.join(get_args(Kind))}")
    if not isinstance(reason, str) or not reason.strip():
        raise GapsError(f"{where}: reason is {reason!r}; say why in a sentence")
    capability = entry.get("capability", {})
    if not isinstance(capability, dict) or set(capability) - CAPABILITY_KEYS:
        raise GapsError(f"{where}: capability is {capability!r}; its keys are {sorted(CAPABILITY_KEYS)}")
    if not capability and "test" not in entry:
        raise GapsError(f"{where}: names neither a test nor a capability; give one")
    for key in ("test", "backend"):
        if not isinstance(entry.get(key, ""), str):
            raise GapsError(f"{where}: {key} is {entry[key]!r}; write text in quotes")
    pairs = tuple((str(key), str(value)) for key, value in capability.items())
    return Gap(kind, reason, entry.get("test"), pairs, entry.get("backend"))
