"""One YAML file as plain data, and the file and line of every value in it.

Scalars are resolved here by the core schema of YAML 1.2 (yaml.org/spec/1.2.2, section 10.3), not by the parser, so that `1e-4` is a
number, `no`, `off` and `12:30` are text, and every value keeps the text that its author wrote, for messages.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from flashbench.errors import ConfigError, nearest

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_VALUES = 100_000
"""Aliases of aliases can make a small file huge; nobody writes a configuration of this size."""

RIVALS: dict[str, tuple[str, ...]] = {
    "batch": ("tokens",),
    "tokens": ("batch",),
    "heads": ("hidden",),
    "hidden": ("heads",),
    "seq_len": ("seq_q", "seq_kv"),
    "seq_q": ("seq_len",),
    "seq_kv": ("seq_len",),
}
"""Keys of `problems` that say the same thing in two ways: giving one replaces what a base file says with the other."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})|0o[0-7]{1,20}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"))
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
    | dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf"))
    | {"-.inf": float("-inf"), ".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan")}
)
_STANDARD = "tag:yaml.org,2002:"
_TAGS = frozenset(
    _STANDARD + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "map", "seq")
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a file and line, or an option of the command line (line None); `text` is a scalar as written."""

    file: str
    line: int | None = None
    text: str | None = None

    @property
    def prefix(self) -> str:
        """`forward.yaml:7: `, or `--seq-len: `."""
        return f"{self.file}: " if self.line is None else f"{self.file}:{self.line}: "


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration before it is validated: plain data, and the place of each key path in it."""

    data: dict[str, Any]
    places: dict[KeyPath, Place]

    def locate(self, path: KeyPath) -> tuple[KeyPath, Place]:
        """The place of `path`, or of the nearest thing around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return path, self.places.get(path, Place("configuration"))


def read(path: Path) -> Document:
    """The file at `path` with its `extends:` chain merged in, nearest file last.

    Raises ConfigError, starting with `file:line: ` (`file: ` when the file cannot be opened at all).
    """
    return _read(path, (), f"{path}: ")


def _read(path: Path, chain: tuple[Path, ...], prefix: str) -> Document:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"{prefix}no file '{path}'{nearest(path.name, others)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{prefix}'{path}' is a folder; name a YAML file inside it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{prefix}cannot read '{path}': {getattr(error, 'strerror', None) or error}") from None
    document = parse(content, str(path))
    if "extends" not in document.data:
        return document
    base = document.data.pop("extends")
    place = document.places.pop(("extends",))
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{place.prefix}extends: names one base file, relative to this one, as in 'extends: forward.yaml'"
        )
    chain = (*chain, path.resolve())
    base_path = path.parent / base
    if base_path.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, base_path))
        raise ConfigError(f"{place.prefix}extends: comes back to a file it started from ({names})")
    return merge(_read(base_path, chain, f"{place.prefix}extends: "), document)


def parse(content: bytes, file: str) -> Document:
    """YAML text as a Document; `file` is the name that messages show. ConfigError for anything but one mapping."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file}:{line}: is not UTF-8 text (byte {content[error.start]:#04x}); is it a YAML file?"
        ) from None
    yaml = YAML(typ="safe", pure=True)
    places: dict[KeyPath, Place] = {(): Place(file, 1)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ReusedAnchorWarning
            )  # the specification allows an anchor to be defined again
            root = yaml.compose(text)
        if root is None:
            raise ConfigError(f"{file}:1: is empty; a configuration names at least 'providers' and 'problems'")
        data = _value(root, (), file, places, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{file}:{mark.line + 1 if mark else 1}: is not valid YAML: {told}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{file}:{line}: holds the control character {ord(text[error.position]):#04x}; is it a YAML file?"
        ) from None
    except YAMLError as error:
        raise ConfigError(f"{file}:1: is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{file}:1: is nested too deeply to read") from None
    if not isinstance(data, dict):
        found = "a list" if isinstance(data, list) else "a single value"
        raise ConfigError(
            f"{file}:{root.start_mark.line + 1}: holds {found}; a configuration is a mapping such as 'providers: [naive]'"
        )
    return Document(data, places)


def merge(base: Document, over: Document) -> Document:
    """`over` on top of `base`: mappings merge key by key, anything else is replaced, and a rival key of `problems` goes."""
    replaced: set[KeyPath] = set()

    def merged(below: dict[str, Any], above: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        result = dict(below)
        for key, value in above.items():
            for rival in RIVALS.get(key, ()) if path == ("problems",) else ():
                if rival not in above and result.pop(rival, None) is not None:
                    replaced.add((*path, rival))
            old = result.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                result[key] = merged(old, value, (*path, key))
            else:
                result[key] = value
                replaced.add((*path, key))
        return result

    data = merged(base.data, over.data, ())
    kept = {p: place for p, place in base.places.items() if not any(p[:n] in replaced for n in range(1, len(p) + 1))}
    return Document(data, kept | over.places)


def _value(node: Node, path: KeyPath, file: str, places: dict[KeyPath, Place], parents: tuple[int, ...]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in parents:
        raise ConfigError(f"{file}:{line}: is an alias of something that holds it")
    if (tag := str(node.tag)) not in _TAGS:
        raise ConfigError(f"{file}:{line}: has the tag {tag.replace(_STANDARD, '!!')}; a configuration uses no tags")
    if len(places) > MAX_VALUES:
        raise ConfigError(f"{file}:{line}: the file holds more than {MAX_VALUES:,} values (aliases counted out)")
    parents = (*parents, id(node))
    if isinstance(node, ScalarNode):
        places[path] = Place(file, places[path].line if path in places else line, node.value)
        return _scalar(node)
    if isinstance(node, SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            places[*path, index] = Place(file, item.start_mark.line + 1)
            items.append(_value(item, (*path, index), file, places, parents))
        return items
    assert isinstance(node, MappingNode)
    return _mapping(node, path, file, places, parents)


def _mapping(
    node: MappingNode, path: KeyPath, file: str, places: dict[KeyPath, Place], parents: tuple[int, ...]
) -> dict[str, Any]:
    lines: dict[str, int] = {}
    inherited: list[Node] = []
    entries: list[tuple[str, Node]] = []
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise ConfigError(f"{file}:{line}: a key is a single word, not a list or a mapping")
        key = key_node.value
        if key in lines:
            raise ConfigError(
                f"{file}:{line}: the key '{key}' stands twice in one mapping, on lines {lines[key]} and {line}"
            )
        lines[key] = line
        if key == "<<" and key_node.style is None:
            inherited = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        else:
            entries.append((key, value_node))
    result: dict[str, Any] = {}
    for source in inherited:
        if not isinstance(source, MappingNode):
            raise ConfigError(f"{file}:{lines['<<']}: '<<' merges a mapping or a list of mappings")
        if id(source) in parents:
            raise ConfigError(f"{file}:{lines['<<']}: '<<' merges a mapping into itself")
        found: dict[KeyPath, Place] = {}
        for key, value in _mapping(source, path, file, found, (*parents, id(source))).items():
            if key not in result and key not in lines:
                result[key] = value
                depth = len(path)
                places.update({p: place for p, place in found.items() if p[depth] == key})
    for key, value_node in entries:
        places[*path, key] = Place(file, lines[key])
        result[key] = _value(value_node, (*path, key), file, places, parents)
    return result


def _scalar(node: ScalarNode) -> Any:
    text: str = node.value
    if node.style is not None or node.tag == _STANDARD + "str":  # quoted, a block, or plain text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
