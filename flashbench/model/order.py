"""The order in which this project's kernels start the blocks of a launch (kernels/schedule.py), and what a launch costs that is replayed in part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

LEAST_SECTIONS = 16
"""Sections that stand for any number of them: the last three, whose shortest blocks end a launch, and as many as let it find its pace."""


def section_count(heads: int, head_bytes: int, l2_bytes: int) -> int:
    """Sections in which this project's kernels take causal heads (kernels/schedule.py, `section_count`)."""
    return -(-heads // max(1, l2_bytes // 3 // head_bytes))


def dealt(heads: int, blocks: int, sections: int | None, group: int) -> Iterator[tuple[int, int]]:
    """(head, block) in the order in which this project's kernels start them (kernels/schedule.py, `dealt`); no sections: blocks of one length."""
    kept, late = (blocks // 3, max(0, sections - 3)) if sections else (0, 0)
    count = sections or heads // group
    smaller, larger = divmod(heads // group, count)
    starts = [0, *itertools.accumulate(group * (smaller + (number >= count - larger)) for number in range(count))]
    for section, (start, end) in enumerate(itertools.pairwise(starts)):
        for block in range(blocks - kept if section >= late else blocks):
            yield from ((head, block) for head in range(start, end))
    for block in range(blocks - kept, blocks):
        yield from ((head, block) for head in range(starts[late], heads))


def of_all_heads(
    replayed: Callable[[int, int | None], tuple[float, float]],
    heads: int,
    enough: int,
    group: int,
    sections: int | None,
) -> tuple[float, float]:
    """What a launch of `heads` costs (bytes read again, bytes spilled), from `replayed` of as many of them as are `enough`, in whole groups.

    What the rest costs is told by the later of them. A launch in sections is replayed in no fewer than LEAST_SECTIONS: what lies between the
    first of them and the last few costs as much a section.
    """
    if sections is None:
        some = min(heads, -(-enough // group) * group)
        fewer = some // 2 // group * group
        if some >= heads or not fewer:
            again, spilled = replayed(some, None)
            return again * heads / some, spilled * heads / some
        few, many = replayed(fewer, None), replayed(some, None)
        left = (heads - some) / (some - fewer)
    else:
        size = -(-heads // group // sections) * group
        some_sections = max(LEAST_SECTIONS, -(-enough // size))
        if some_sections >= sections:
            return replayed(heads, sections)
        few, many = (replayed(count * size, count) for count in (some_sections - 1, some_sections))
        left = heads / size - some_sections
    again, spilled = (after + left * max(0.0, after - before) for before, after in zip(few, many, strict=True))
    return again, spilled
