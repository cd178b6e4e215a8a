"""Plain text in aligned columns, the same on every terminal: for sheets of figures, which people paste and tests compare."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int, right: int | None = None) -> list[str]:
    """The lines of a table. The first `left` columns, and those from `right` on, stand to the left; numbers to the right."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]

    def cell(i: int, text: str) -> str:
        to_the_left = i < left or (right is not None and i >= right)
        return text.ljust(widths[i]) if to_the_left else text.rjust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
