"""Which backends a caller wants: argument > `prefer(...)` > OCTAVO_BACKEND > none. And the state token."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from weakref import WeakSet

from octavo import NoBackendError
from octavo_registry.discovery.locks import ForkSafeLock

ENVIRONMENT = "OCTAVO_BACKEND"
REST = "*"
"""In a preference: every backend that is not named, after those that are."""

Preference = tuple[str, ...]
Mirror = Callable[[Preference | None], AbstractContextManager[object]]

_NAME = re.compile(r"\*|[a-z0-9][a-z0-9._-]{0,63}")


class UnknownBackendError(NoBackendError, ValueError):
    """A preference names a backend that is not installed, or its text is not a name."""


class _Scope:
    """One preference value of this process. `token` is replaced whenever plans under it may be stale."""

    __slots__ = ("__weakref__", "names", "token")

    def __init__(self, names: Preference | None) -> None:
        self.names = names
        self.token = object()


_NO_PREFERENCE = _Scope(None)
_scopes: dict[Preference | None, _Scope] = {None: _NO_PREFERENCE}
"""Scopes that equal preferences share: the most recent ones."""
_MOST_SCOPES = 256
_all_scopes: WeakSet[_Scope] = WeakSet([_NO_PREFERENCE])
"""Those that some context may still hold."""
_current: ContextVar[_Scope] = ContextVar("octavo_preference", default=_NO_PREFERENCE)
_open_blocks: ContextVar[tuple[tuple[Preference, ExitStack], ...]] = ContextVar("octavo_prefer_blocks", default=())
_mirrors: list[Mirror] = []
_lock = ForkSafeLock()
_environment: list[Preference | None] = []

_get_current = _current.get


def state_token() -> object:
    """An object whose identity changes whenever an earlier plan may no longer be the right one.

    It changes with the preference of this context (`prefer`) and with the set of registered plugins; equal
    preferences share one token, so a block that is entered again finds its plans valid. Read it before planning,
    keep it with the plan, and compare with `is`. Costs about one ContextVar lookup.
    """
    return _get_current().token


def renew_tokens() -> None:
    """Make every token stale: the set of plugins has changed."""
    with _lock:
        for scope in _all_scopes:
            scope.token = object()


def parse(names: Sequence[str], source: str) -> Preference:
    """`names` without repetitions, checked; `source` says in errors where they came from."""
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UnknownBackendError(
                f"{source}: got {name!r}; a backend's name has lower-case letters, digits, '.', '_' and '-', "
                "and '*' stands for the rest"
            )
    if not names:
        raise UnknownBackendError(f"{source}: got no name; name a backend, or leave the preference out")
    return tuple(dict.fromkeys(names))


def from_argument(backend: str | Sequence[str] | None) -> Preference | None:
    """The preference in a `backend=` argument; `UnknownBackendError` for what holds no names."""
    if backend is None:
        return None
    given: object = backend
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise UnknownBackendError(f"backend: got {given!r}; give a name, or several in order of preference")
    return parse((given,) if isinstance(given, str) else tuple(given), "backend")


def from_environment() -> Preference | None:
    """The preference in OCTAVO_BACKEND, a comma list, which is read once per process."""
    if not _environment:
        text = os.environ.get(ENVIRONMENT, "")
        names = [part.strip() for part in text.split(",")] if text.strip() else []
        _environment.append(parse(names, ENVIRONMENT) if names else None)
    return _environment[0]


def shown(preference: Preference) -> str:
    """Its names for a message, and the variable if it has set them: nothing in the user's program would show where."""
    names = ", ".join(preference)
    return f"{names}, as {ENVIRONMENT} says" if preference in _environment else names


def current() -> Preference | None:
    """The preference of this context: the innermost `prefer`, else OCTAVO_BACKEND, else None."""
    names = _current.get().names
    return from_environment() if names is None else names


def source_of(backend: str | Sequence[str] | None) -> str:
    """Where the preference in force comes from, for errors."""
    if backend is not None:
        return "backend"
    return "prefer" if _current.get().names is not None else ENVIRONMENT


def _scope_of(preference: Preference) -> _Scope:
    """The scope that equal preferences share. Beyond _MOST_SCOPES the oldest is forgotten, except that of None."""
    scope = _scopes.get(preference)
    if scope is None:
        if len(_scopes) >= _MOST_SCOPES:
            del _scopes[next(names for names in _scopes if names is not None)]
        scope = _scopes[preference] = _Scope(preference)
        _all_scopes.add(scope)
    return scope


@contextmanager
def prefer(*names: str) -> Iterator[None]:
    """In this block only the named backends serve, in this order; `"*"` lets the rest in, after them.

    Belongs to the context: asyncio tasks inherit it, a new thread starts without it (run it in
    `contextvars.copy_context()`), and plans that were made outside are not touched. The innermost block wins whole.
    Raises `UnknownBackendError` for text that is not a name; whether a name is installed is checked at the first plan.
    """
    preference = parse(names, "prefer")
    with _lock:
        scope = _scope_of(preference)
    with ExitStack() as stack:
        set_scope = _current.set(scope)
        stack.callback(_current.reset, set_scope)
        set_blocks = _open_blocks.set((*_open_blocks.get(), (preference, stack)))
        stack.callback(_open_blocks.reset, set_blocks)
        for mirror in _mirrors:
            stack.enter_context(mirror(preference))
        yield


def mirror_preference(mirror: Mirror) -> None:
    """Have `mirror(names)` entered and left with every `prefer` block, for a framework that caches by its own context.

    octavo-jax passes its `jax.make_user_context` here, so that a jitted function is traced again under another
    preference. Blocks that are open in this context are entered at once.
    """
    _mirrors.append(mirror)
    for names, stack in _open_blocks.get():
        stack.enter_context(mirror(names))
