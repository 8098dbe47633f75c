"""The line that a warning names: the user's, however many frames of ours and of frameworks lie between."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.caller import Place, place_of_caller, stacklevel_of_caller

WARN = """
def call():
    warnings.warn("said", stacklevel=stacklevel_of_caller())
    return place_of_caller()
"""
PASS_ON = """
def call():
    return inner()
"""
OURS = "octavo_torch.scaling.recipe_module"


def call_through(*modules: str) -> Callable[[], Place]:
    """A function that warns in the first of these modules, is called by the second, and so on."""
    inner: Any = None
    for module in modules:
        names = {"__name__": module, "inner": inner, "warnings": warnings}
        names |= {function.__name__: function for function in (stacklevel_of_caller, place_of_caller)}
        exec(compile(PASS_ON if inner else WARN, f"/{module}.py", "exec"), names)
        inner = names["call"]
    return inner  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "modules",
    [
        (OURS,),
        (OURS, "octavo_torch.moe.module", "octavo.renamed", "contextlib"),
        ("octavo_jax.modules.recipe_said", "flax.linen.module", "jax._src.api", "functools", "flax.core.scope"),
        ("octavo_registry.dispatch.dispatcher", "octavo_torch.dispatch.plans", "torch.nn.modules.module"),
    ],
    ids=len,
)
def test_a_warning_names_the_users_line(modules: tuple[str, ...]) -> None:
    """Past every frame of ours and of the frameworks, whose number changes with their versions."""
    call = call_through(*modules)
    with pytest.warns(UserWarning, match="said") as said:
        place, line = call(), inspect.currentframe().f_lineno  # type: ignore[union-attr]
    assert place == Place(__file__, line)
    assert [(one.filename, one.lineno) for one in said] == [(__file__, line)]


def test_a_users_module_may_have_a_name_like_ours() -> None:
    """`octavo_experiments` and `jaxlike` are programs of users, and so is the function that they call us from."""
    for users in ("octavo_experiments", "jaxlike.train", "__main__"):
        with pytest.warns(UserWarning, match="said"):
            assert call_through(OURS, users, OURS)() == Place(f"/{users}.py", 3)


def test_an_init_that_dataclasses_write_is_on_no_line() -> None:
    """As modules of flax have it: the user's line is the one that makes the object."""

    @dataclass
    class Module:
        place: Place = field(default_factory=call_through(OURS))

    with pytest.warns(UserWarning, match="said") as said:
        module, line = Module(), inspect.currentframe().f_lineno  # type: ignore[union-attr]
    assert module.place == Place(said[0].filename, said[0].lineno) == Place(__file__, line)
