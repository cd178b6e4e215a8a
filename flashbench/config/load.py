"""A configuration from a file, or the built-in one, with the lists that the command line replaces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from flashbench.config import source
from flashbench.config.schema import Config, key_text
from flashbench.config.source import Document, KeyPath, Place
from flashbench.errors import ConfigError

Kind = Literal["cpu", "cuda"]

OVERRIDES: dict[str, KeyPath] = {
    "provider": ("providers",),
    "mode": ("problems", "mode"),
    "dtype": ("problems", "dtype"),
    "seq_len": ("problems", "seq_len"),
    "head_dim": ("problems", "head_dim"),
    "mask": ("problems", "mask"),
    "batch": ("problems", "batch"),
    "tokens": ("problems", "tokens"),
    "heads": ("problems", "heads"),
    "hidden": ("problems", "hidden"),
    "device": ("device",),
    "l2": ("measure", "l2"),
    "rounds": ("measure", "rounds"),
    "energy": ("measure", "energy"),
}
"""What an option of the command line replaces. Lists are separated by commas."""

_SINGLE = frozenset({"device", "l2", "rounds", "energy"})
_FLAGS = frozenset({"energy"})
"""Options without a value: given means true."""


def load(path: Path | None = None, overrides: Mapping[str, str | None] | None = None, kind: Kind = "cpu") -> Config:
    """The configuration at `path`, or the built-in one for `kind` of device when path is None.

    `overrides` maps names of OVERRIDES to the text given on the command line; None is an option that was not given. Replaced axes drop
    `include`, whose problems are not on them; replaced providers keep only the providers of `include` that they name. Raises
    ConfigError, starting with `file:line: ` or with the option's name.
    """
    document = source.read(path) if path is not None else _builtin(kind)
    if path is not None and "name" not in document.data:
        document.data["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "run"
    given = {name: text for name, text in (overrides or {}).items() if text is not None}
    notes = []
    axes = [name for name in given if OVERRIDES[name][0] == "problems"]
    if axes and document.data.get("include"):
        document.data.pop("include")
        notes.append(f"'include' is left out, because {', '.join(map(_option, axes))} replaces an axis of the sweep")
    config = validate(source.merge(document, _from_options(given)))
    if "provider" in given:
        kept = [
            block for block in config.include if not block.providers or set(block.providers) & set(config.providers)
        ]
        if len(kept) < len(config.include):
            notes.append(
                f"{len(config.include) - len(kept)} of 'include' left out, because --provider names none of its providers"
            )
        include = [
            block.model_copy(update={"providers": tuple(p for p in block.providers if p in config.providers)})
            for block in kept
        ]
        config = config.model_copy(update={"include": tuple(include)})
    config._notes = tuple(notes)
    config._narrowed = bool(axes) or "provider" in given
    return config


def validate(document: Document) -> Config:
    """A Config, or a ConfigError about the first thing that is wrong with the document."""
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        found = [_explained(document, dict(e)) for e in error.errors(include_url=False)]
        found.sort(key=lambda item: item[0].line or 0)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(found[0][1] + more) from None
    config._places = document.places
    return config


def _explained(document: Document, error: dict[str, Any]) -> tuple[Place, str]:
    """Place and message of one of pydantic's errors; a value that is wrong by itself is shown as it was written."""
    context = error.get("ctx", {})
    path: KeyPath = (*error["loc"], *context.get("path", ()))
    if error["type"] == "missing":
        found, place = document.locate(path[:-1])
        return place, f"{place.prefix}{key_text(found)}'{path[-1]}' is missing"
    found, place = document.locate(path)
    start = place.prefix if place.line is None else place.prefix + key_text(found)
    if error["type"] == "unknown_key":
        return place, place.prefix + key_text(found[:-1]) + context["sentence"]
    if error["type"] == "sentence":
        return place, start + context["sentence"]
    return place, f"{start}{_subject(error['input'], place)} {context.get('error') or error['msg']}"


def _subject(value: object, place: Place) -> str:
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    text = str(value) if place.text is None else place.text
    return f"'{text if len(text) <= 60 else text[:57] + '...'}'" if text else "an empty value"


def _builtin(kind: Kind) -> Document:
    name = f"default_{kind}.yaml"
    return source.parse(resources.files("flashbench.config").joinpath(name).read_bytes(), f"built-in {name}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _from_options(given: Mapping[str, str]) -> Document:
    """Options as a document on top of the file's, whose places are the options themselves."""
    data: dict[str, Any] = {}
    places: dict[KeyPath, Place] = {}
    for name, text in given.items():
        *blocks, key = path = OVERRIDES[name]
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        block = data
        for step in blocks:
            block = block.setdefault(str(step), {})
        block[str(key)] = True if name in _FLAGS else text.strip() if name in _SINGLE else items
        places[path] = Place(_option(name), None, text.strip() if name in _SINGLE else None)
        if name not in _SINGLE:
            places |= {(*path, index): Place(_option(name), None, item) for index, item in enumerate(items)}
    return Document(data, places)
