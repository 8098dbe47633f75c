"""The base of everything that Octavo writes down: frozen, strict about names, plain about errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.errors import RecipeError, explain_validation


class Schema(BaseModel):
    """A frozen value object. Unknown fields and bad values raise `RecipeError`, which is a `ValueError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RecipeError(explain_validation(type(self).__name__, error)) from None
