"""The directive `api`: entries for the names of a module, one per line, so that a page can group them by task.

Constructors are shown as they are: a metaclass or **options with a TypedDict hide the arguments from autodoc.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

HIDDEN, OURS = "(*args", "octavo"
_KEYWORDS = inspect.Parameter.VAR_KEYWORD


class Api(SphinxDirective):
    """`{api} module` with names in its content; a name that the module lacks is an error."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """The entries, in the order of the names."""
        module = importlib.import_module(self.arguments[0])
        lines = [f".. currentmodule:: {self.arguments[0]}", ""]
        for name in filter(None, map(str.strip, self.content)):
            if not hasattr(module, name):
                raise self.error(f"{self.arguments[0]} has no {name}")
            lines += [f".. auto{_kind(getattr(module, name))}:: {name}", ""]
        return self.parse_text_to_nodes("```{eval-rst}\n" + "\n".join(lines) + "```\n")


def _kind(value: object) -> str:
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def show_constructor(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, result: str | None
) -> tuple[str, str | None] | None:
    """The signature of a class whose metaclass hides it, with what its **options pass on to its bases."""
    if what != "class" or not isinstance(value, type) or not (signature or "").startswith(HIDDEN):
        return None
    if not _is_made_by_its_metaclass(value):
        return None
    own = inspect.signature(value.__init__)
    parameters = [one for one in own.parameters.values() if one.name != "self"]
    if parameters and parameters[-1].kind is _KEYWORDS and value.__init__.__module__.startswith(OURS):
        hints = typing.get_type_hints(value.__init__, include_extras=True)
        parameters[-1:] = _passed_on(value, hints.get(parameters[-1].name), {one.name for one in parameters})
    shown = [one.replace(default=_Default.of(one.default)) for one in parameters]
    return stringify_signature(own.replace(parameters=shown), unqualified_typehints=True), result


def _is_made_by_its_metaclass(value: type) -> bool:
    return any("__call__" in vars(kind) for kind in type(value).__mro__ if kind not in (type, object))


def _passed_on(value: type, hint: object, known: set[str]) -> list[inspect.Parameter]:
    """Keyword-only parameters of the bases' constructors; with `Unpack[SomeTypedDict]` those that it names."""
    found: dict[str, inspect.Parameter] = {}
    for base in value.__mro__[1:]:
        if "__init__" in vars(base) and base.__module__.startswith(OURS):
            for one in inspect.signature(base.__init__).parameters.values():
                if one.kind is inspect.Parameter.KEYWORD_ONLY and one.name not in known:
                    found.setdefault(one.name, one)
    (given,) = typing.get_args(hint) or (None,)
    named = typing.get_type_hints(given) if typing.is_typeddict(given) else found
    return [one for key, one in found.items() if key in named]


class _Default:
    """A default as a reader writes it: a function by its name, other values as they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @classmethod
    def of(cls, value: object) -> object:
        """What to show for `value`."""
        if not callable(value) or value is inspect.Parameter.empty:
            return value
        name = getattr(value, "__name__", type(value).__name__)
        return cls("..." if "<locals>" in getattr(value, "__qualname__", "") else name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive and the signatures."""
    app.add_directive("api", Api)
    app.connect("autodoc-process-signature", show_constructor)
    return {"parallel_read_safe": True}
