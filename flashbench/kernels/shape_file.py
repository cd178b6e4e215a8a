"""Rewriting a list of `block_shapes.yaml`, line by line, so that every comment of the file stays where a person put it.

kernel:
  family:
    kind:
      width:  # how this order was found
        - 128x64 w4 s3 tma
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashbench.errors import UsageError
from flashbench.kernels.blocks import BlockShape

INDENT = 2
_KEY = re.compile(r"( *)([^\s#][^:#]*):(.*)")


def rewritten(text: str, path: tuple[str, str, str, int], shapes: Sequence[BlockShape], note: str) -> str:
    """The file's text with the list at `path` (kernel, family, kind, width) replaced, or added where it is missing.

    `note` becomes the comment behind the width. A comment beside or above a shape moves with it. UsageError for a list that is not
    written one shape a line.
    """
    lines = text.splitlines()
    start, end = 0, len(lines)
    for depth, name in enumerate(map(str, path)):
        at = _find(lines, start, end, depth, name)
        if at is None:
            return "\n".join(_added(lines, end, depth, path, shapes, note)) + "\n"
        start, end = at + 1, _end(lines, at + 1, end, depth)
    key = lines[start - 1].partition("#")[0]
    if key.partition(":")[2].strip():
        raise UsageError(
            f"the shapes of {' / '.join(map(str, path))} share a line; write them one a line, each behind '- '"
        )
    kept = _with_comments(lines[start:end])
    rows = [line for shape in shapes for line in kept.get(shape.row(), [_row(shape)])]
    return "\n".join([*lines[: start - 1], f"{key.rstrip()}  # {note}", *rows, *lines[end:]]) + "\n"


def _row(shape: BlockShape) -> str:
    return f"{'':{4 * INDENT}}- {shape.row()}"


def _find(lines: list[str], start: int, end: int, depth: int, name: str) -> int | None:
    """The line of a key at a depth."""
    for i in range(start, end):
        found = _KEY.fullmatch(lines[i])
        if found and len(found[1]) == depth * INDENT and found[2].strip("'\" ") == name:
            return i
    return None


def _end(lines: list[str], start: int, limit: int, depth: int) -> int:
    """Behind the last line that belongs to a key of that depth; comments before the next key are the next key's."""
    end = start
    for i in range(start, limit):
        line = lines[i]
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        if len(line) - len(line.lstrip()) <= depth * INDENT:
            break
        end = i + 1
    return end


def _added(
    lines: list[str], end: int, depth: int, path: tuple[str, str, str, int], shapes: Sequence[BlockShape], note: str
) -> list[str]:
    """The lines with the keys that are missing from `depth` on."""
    keys = [f"{'':{level * INDENT}}{path[level]}:" for level in range(depth, len(path))]
    keys[-1] += f"  # {note}"
    if depth == 0:
        return [*lines, "", *keys, *map(_row, shapes)]
    at = end
    if depth == 1:  # a kernel without rows is written `kernel: {}`
        at = next(i for i in range(end - 1, -1, -1) if _KEY.fullmatch(lines[i]) and not lines[i].startswith(" ")) + 1
        lines = [*lines[: at - 1], re.sub(r":\s*\{\s*\}", ":", lines[at - 1]), *lines[at:]]
    return [*lines[:end], *keys, *map(_row, shapes), *lines[end:]]


def _with_comments(lines: list[str]) -> dict[str, list[str]]:
    """Each row of a list with the comment lines above it."""
    found: dict[str, list[str]] = {}
    above: list[str] = []
    for line in lines:
        above.append(line)
        bare = line.strip()
        if bare.startswith("- "):
            found[bare[2:].partition("#")[0].strip().strip("'\"")] = above
            above = []
    return found
