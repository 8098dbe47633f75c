"""Base class of the serialized values: immutable, with no unknown fields and with readable errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from operator import itemgetter
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.errors import RecipeError, explain_validation


def not_a_truth_value(value: object) -> object:
    """`value`, which is to be a number; ValueError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"got {value}, a truth value; give a number")
    return value


class Schema(BaseModel):
    """A frozen value object. Unknown fields and bad values raise `RecipeError`, which is a `ValueError`.

    Equality and hash read the fields without running pydantic, because specs are dictionary keys on hot paths.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _values: ClassVar[Callable[[dict[str, Any]], Any]]

    def __init__(self, /, *values: object, **data: Any) -> None:
        if values:
            name, known = type(self).__name__, ", ".join(type(self).model_fields)
            raise TypeError(f"{name} was given {values[0]!r} by position; give fields by name: {known}")
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RecipeError(explain_validation(type(self).__name__, error, type(self).model_fields)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__pydantic_fields__:
            cls._values = itemgetter(*cls.__pydantic_fields__)

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        raise RecipeError(f"{kind}.{name}: cannot be set to {value!r}, because it never changes; make another {kind}")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's copy, except that the values of `update` are validated."""
        if not update:
            return super().model_copy(deep=deep)
        own = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**own | dict(update))

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Fields and their values. pydantic's iterator would also give cached properties, one of which may be the value
        itself."""
        yield from ((name, getattr(self, name)) for name in type(self).model_fields)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        values = type(self)._values
        return bool(values(self.__dict__) == values(other.__dict__))

    def __hash__(self) -> int:
        return hash((type(self), type(self)._values(self.__dict__)))
