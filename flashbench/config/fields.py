"""What the blocks of a configuration are made of: a strict mapping, and the types of its values.

A type says how pydantic reads a value, writes it back, and describes it to an editor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from flashbench.config import scalars
from flashbench.config.scalars import Pair
from flashbench.errors import nearest
from flashbench.records import DTYPES, MODES

T = TypeVar("T")


def refuse(sentence: str, *path: str | int) -> PydanticCustomError:
    """An error that is a whole sentence, about the key at `path` inside the model that raises it."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence, "path": path})


def _listed(value: object) -> object:
    if value is None or value == []:
        raise refuse("names nothing; give at least one value")
    return value if isinstance(value, (list, tuple)) else [value]


class _OrScalar:
    """In the JSON Schema, a list may also be written as its only item."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        listed = handler(core)
        return {"anyOf": [listed["items"], listed | {"minItems": 1}]}


_WHOLE: dict[str, Any] = {"type": "integer", "minimum": 1}
_K = "[1-9][0-9]*k?"
_FRACTION = {
    "anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "string", "pattern": r"^[0-9.]+ ?%$"}]
}


def _either(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_WHOLE, {"type": "string", "pattern": f"^{pattern}$"}]})


def _plain_fraction(value: float | None) -> float | str | None:
    return f"{100 * value:g}%" if value is not None and value >= 1 else value


_as_written = PlainSerializer(Pair.plain)

Many: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_listed), _OrScalar()]
"""One value or several; () when the key was not given."""
Length = Annotated[int, BeforeValidator(scalars.length), _either(_K)]
LengthPair = Annotated[Pair, BeforeValidator(scalars.pair), _as_written, _either(f"{_K}(/{_K})?")]
Heads = Annotated[Pair, BeforeValidator(scalars.heads), _as_written, _either(f"{_K}(/{_K})?")]
Fraction = Annotated[
    float, BeforeValidator(scalars.fraction), PlainSerializer(_plain_fraction), WithJsonSchema(_FRACTION)
]
Width = Annotated[Fraction, AfterValidator(scalars.positive)]
Count = Annotated[int, BeforeValidator(scalars.count), WithJsonSchema({"type": "integer", "minimum": 0})]
Number = Annotated[float, BeforeValidator(scalars.number), WithJsonSchema({"type": "number", "minimum": 0})]
Positive = Annotated[
    float, BeforeValidator(scalars.positive), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
]
Truth = Annotated[bool, BeforeValidator(scalars.truth)]
Text = Annotated[str, BeforeValidator(scalars.text)]
Provider = Annotated[str, BeforeValidator(scalars.provider)]
DtypeName = Annotated[str, BeforeValidator(scalars.dtype), WithJsonSchema({"enum": list(DTYPES)})]
ModeName = Annotated[str, BeforeValidator(scalars.mode), WithJsonSchema({"enum": list(MODES)})]
MaskName = Annotated[
    str, BeforeValidator(scalars.mask), WithJsonSchema({"type": "string", "pattern": f"^(none|causal|window:{_K})$"})
]


def one_of(what: str, *known: str) -> BeforeValidator:
    return BeforeValidator(partial(scalars.one_of, known=known, what=what))


class Block(BaseModel):
    """A mapping that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: object) -> object:
        if data is None:
            return {}  # a block whose every line is commented out
        if not isinstance(data, Mapping):
            raise refuse(f"must be a mapping of {', '.join(cls.model_fields)}")
        for key in data:
            if key not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                sentence = f"unknown key '{key}'{nearest(key, cls.model_fields)} (known: {known})"
                raise PydanticCustomError("unknown_key", "{sentence}", {"sentence": sentence, "path": (key,)})
        return data
