"""Recipe: the base class of recipes with its JSON form and fingerprint, and the recipe that quantizes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from octavo.errors import RecipeError, did_you_mean, shown
from octavo.formats import DType
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME, Operand, Orientation, QuantizerSpec
from octavo.schema import Schema

Gemm = Literal["fprop", "dgrad", "wgrad"]
Slot = Literal["quantized", "high_precision"]

GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")

READERS: dict[Operand, tuple[Gemm, Gemm]] = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}
"""For each operand: the GEMM that reads its rowwise plane, and the GEMM that reads its columnwise plane."""


MOST_BYTES = 1 << 16
"""The longest text that is read as a recipe; a long recipe has two thousand bytes."""
_MOST_DOTS = 100


def _check_text(form: str, text: object) -> None:
    wanted = (str, bytes) if form == "JSON" else str
    if not isinstance(text, wanted):
        raise RecipeError(f"not a recipe: got {type(text).__name__}; give the text of a {form} document")
    if len(text) > MOST_BYTES:
        raise RecipeError(f"not a recipe: larger than {MOST_BYTES} bytes; a recipe is smaller")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecipeError(f"not a recipe: {shown(twice)} stands twice; give each field once")
    return content


class Recipe(Schema):
    """How the three GEMMs of a grouped linear layer are computed: an immutable, hashable value.

    Each GEMM has a slot, so "quantized forward, high-precision backward" is a recipe too. A subclass sets
    `kind` to a `Literal` of its own name and says in `_spec` how each operand is quantized; defining it makes
    the kind known to `Recipe.from_json`.

    fprop, dgrad, wgrad   "quantized", or "high_precision": that GEMM multiplies the unquantized operands
    output_dtype          dtype of y, and of dy; None: the dtype of x. dx has the dtype of x
    wgrad_dtype           dtype of dw; None: float32 into a main_grad, else the weight's dtype
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    ADDED_FIELDS: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Fields that were added after the kind was first released, with their defaults, which are what a file without them
    means. A field at that value is left out of the JSON form, so that fingerprints of older releases hold."""

    _kinds: ClassVar[dict[str, type[Recipe]]] = {}

    kind: str
    fprop: Slot = "quantized"
    dgrad: Slot = "quantized"
    wgrad: Slot = "quantized"
    output_dtype: DType | None = None
    wgrad_dtype: DType | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        kind = cls.model_fields["kind"].default
        if not isinstance(kind, str):
            return
        known = Recipe._kinds.setdefault(kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RecipeError(
                f"{cls.__qualname__}.kind: {kind!r} belongs to {known.__module__}.{known.__qualname__}; choose another"
            )
        Recipe._kinds[kind] = cls

    @staticmethod
    def kinds() -> Mapping[str, type[Recipe]]:
        """Every recipe class that has been defined, by kind."""
        return MappingProxyType(Recipe._kinds)

    def quantizer(
        self, operand: Operand, *, checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
    ) -> QuantizerSpec | None:
        """How `operand` ("x", "w", "dy") is quantized, in the planes its GEMMs read; None where it is not quantized."""
        if operand not in READERS:
            raise RecipeError(f"quantizer: got {shown(operand)}; the operands of a layer are {', '.join(READERS)}")
        row_gemm, column_gemm = READERS[operand]
        row, column = self.quantizes(row_gemm), self.quantizes(column_gemm)
        if not (row or column):
            return None
        orientation: Orientation = "both" if row and column else "rowwise" if row else "columnwise"
        return self._spec(operand, orientation, checkpoint_name)

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        raise TypeError(f"{type(self).__name__} defines no quantizers; override _spec or set every slot high_precision")

    def replace(self, **changes: Any) -> Self:
        """This recipe with other values of some fields; `RecipeError` for an unknown field or an invalid value.

        octavo.MXFP8().replace(wgrad="high_precision")
        """
        return self.model_copy(update=changes)

    def __setattr__(self, name: str, value: object) -> None:
        raise RecipeError(
            f"{type(self).__name__}.{name}: cannot be set to {value!r}, because a recipe never changes; "
            f"recipe.replace({name}={value!r}) makes another one"
        )

    def quantizes(self, gemm: Gemm) -> bool:
        """True where `gemm` multiplies quantized operands."""
        return bool(getattr(self, gemm) == "quantized")

    @cached_property
    def computed_as(self) -> Recipe:
        """The recipe that backends serve for this one, whose operands and products are the same; by default itself."""
        return self

    @property
    def stateful(self) -> bool:
        """True where scales come from a history that the caller stores (delayed scaling)."""
        return False

    @cached_property
    def stochastic(self) -> bool:
        """True where some operand is rounded stochastically, so that a seed is needed."""
        operands: tuple[Operand, ...] = ("x", "w", "dy")
        return any(spec is not None and spec.stochastic for spec in map(self.quantizer, operands))

    @cached_property
    def batch_invariant(self) -> bool:
        """True where no scale that a row of y depends on is taken from other rows of the batch.

        Current scaling's scales and NVFP4's second level depend on all rows of a group. Delayed scales come from
        earlier steps, so with one state they are the same for every batch. Whether a GEMM's sums depend on other rows
        is up to the backend (`Capability.batch_invariant` of octavo-registry).
        """
        spec = self.quantizer("x") if self.quantizes("fprop") else None
        return spec is None or spec.scaling in ("delayed", "row", "block", "mxfp8")

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON: equal for recipes with the same content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, kind and schema version included, no white space.

        Fields that came after the kind's first release stand there where they differ from what their absence means.
        """
        content = {"schema_version": self.SCHEMA_VERSION, **self.model_dump(mode="json")}
        for name, value in content.items():
            if isinstance(getattr(self, name, None), frozenset):
                content[name] = sorted(value)
        for name, absent in self.ADDED_FIELDS.items():
            if content[name] == absent:
                del content[name]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def to_toml(self) -> str:
        """A TOML document that `from_toml` reads, one field per line; fields without a value are left out."""
        lines = [f'kind = "{self.kind}"']
        for name, value in json.loads(self.to_json()).items():
            if name not in ("kind", "schema_version") and value is not None:
                lines.append(f"{name} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The recipe that `to_json` wrote; `RecipeError` for anything else."""
        _check_text("JSON", text)
        try:
            content = json.loads(text, object_pairs_hook=_without_duplicates)
        except RecipeError:
            raise
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"not a recipe: not valid JSON ({error})") from None
        return cls._from_content(content)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The recipe in a TOML document; `kind` is required, the schema version is not."""
        import tomllib  # compiles patterns for 4 ms, which few programs need

        _check_text("TOML", text)
        # a parser's time grows with the square of the depth of a dotted key
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise RecipeError(f"not a recipe: a line has more than {_MOST_DOTS} dots; a recipe's keys have none")
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"not a recipe: not valid TOML ({error})") from None
        return cls._from_content({"schema_version": cls.SCHEMA_VERSION, **content})

    @classmethod
    def _from_content(cls, content: Any) -> Self:
        if not isinstance(content, dict):
            raise RecipeError(f"not a recipe: got {type(content).__name__}; a recipe is an object of fields")
        fields = dict(content)
        version = fields.pop("schema_version", None)
        if version != cls.SCHEMA_VERSION:
            raise RecipeError(
                f"schema_version: got {shown(version)}; this octavo-core reads {cls.SCHEMA_VERSION}. "
                "Install the octavo-core that wrote the recipe, or write it again"
            )
        kind = fields.get("kind")
        recipe_class = Recipe._kinds.get(kind) if isinstance(kind, str) else None
        if recipe_class is None:
            known = f"known kinds are {', '.join(sorted(Recipe._kinds))}"
            if kind is None:
                raise RecipeError(f"kind: missing; {known}")
            hint = did_you_mean(kind, Recipe._kinds) if isinstance(kind, str) else ""
            raise RecipeError(f"kind: got {shown(kind)}{hint}; {known}")
        if not issubclass(recipe_class, cls):
            raise RecipeError(f"kind: got {kind!r}, which is {recipe_class.__name__}; but {cls.__name__} was asked for")
        return recipe_class(**fields)

    def for_gemm(self, gemm: Gemm) -> Recipe:
        """The recipe that this GEMM's backend sees: `computed_as`, or `HighPrecision` where the slot says so."""
        if self.quantizes(gemm) or isinstance(self, HighPrecision):
            return self.computed_as
        return HighPrecision(output_dtype=self.output_dtype, wgrad_dtype=self.wgrad_dtype)


class HighPrecision(Recipe):
    """No quantization: bf16, fp16 or fp32 operands, fp32 accumulation."""

    kind: Literal["high_precision"] = "high_precision"
    fprop: Literal["high_precision"] = "high_precision"
    dgrad: Literal["high_precision"] = "high_precision"
    wgrad: Literal["high_precision"] = "high_precision"
