"""Custom operators that eager calls pass by: the Python function itself costs less than the dispatcher.

A compiler gets the operator, whose inside it does not see: bits must not depend on how it rewrites a division or keeps
a subnormal. Fake kernels give shapes from static bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from octavo_torch.compiler.tracing import is_plain

P = ParamSpec("P")
R = TypeVar("R")

IMPLEMENTATIONS: dict[str, Callable[..., object]] = {}
"""The eager function behind each operator, by its full name, "namespace::operator"."""

_is_compiling = torch.compiler.is_compiling


class Operators:
    """The operators of one namespace. Keep the object: torch removes the operators when it is gone."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]

    def define(
        self, schema: str, function: Callable[P, R], fake: Callable[..., object] | None = None
    ) -> Callable[P, R]:
        """Define `namespace::<schema>`, whose first argument is a tensor; returns what callers call.

        fake   shapes and dtypes of the results; None for an operator that returns nothing
        """
        name = schema.split("(", 1)[0]
        full_name = f"{self.namespace}::{name}"
        self._library.define(schema)  # type: ignore[no-untyped-call]
        self._library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(full_name, fake or (lambda *_: None), lib=self._library)
        IMPLEMENTATIONS[full_name] = function
        operator = getattr(getattr(torch.ops, self.namespace), name).default

        def call(*args: Any) -> R:
            return function(*args) if is_plain(args[0]) and not _is_compiling() else operator(*args)  # type: ignore[call-arg]

        return call  # type: ignore[return-value]
