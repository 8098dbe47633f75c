"""Base class of the serialized values: immutable, with no unknown fields and with readable errors."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.errors import RecipeError, explain_validation


class Schema(BaseModel):
    """A frozen value object. Unknown fields and bad values raise `RecipeError`, which is a `ValueError`.

    Equality and hash read the fields without running pydantic, because specs are dictionary keys on hot paths.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _values: ClassVar[Callable[[dict[str, Any]], Any]]

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RecipeError(explain_validation(type(self).__name__, error)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__pydantic_fields__:
            cls._values = itemgetter(*cls.__pydantic_fields__)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        values = type(self)._values
        return bool(values(self.__dict__) == values(other.__dict__))

    def __hash__(self) -> int:
        return hash((type(self), type(self)._values(self.__dict__)))
