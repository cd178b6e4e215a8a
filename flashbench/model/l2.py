"""Which of the rows that many thread blocks read are still in the L2: a launch replayed through a small model of the cache.

What decides is the order of the accesses. The blocks of a wave go over the same rows nearly in step and share one read; a head whose
blocks lie in two waves is read again, unless little passed in between. A formula for that has as many cases as there are masks,
orders and shapes; the replay has none. It takes the size of the L2, its partitions and the number of SMs from the device and the
blocks from the kernel:

- Blocks are handed out in order to the places that the SMs have. The SMs are not alike: the slowest falls behind the quickest by LAG of
  every block, so that waves that began in step end spread out, and a long launch reads less than its first waves.
- Rows move in chunks. Each partition of the L2 gives up first what came first, however often it was read since: with the least recently
  used in its place, counts of five orders of work agree less (docs/byte-model.md). A partition has half of the L2 where there are two,
  because what SMs on both sides read is held twice (NVIDIA, A100 Tensor Core GPU Architecture, 2020). Sums lie in one of them.
- A chunk that was written leaves for HBM when it is pushed out. One that nobody pushes out before the last kernel has read it costs
  no HBM byte.

LAG is the one number that was chosen by counters, on one H200. Blocks that each go over more than a partition holds are taken in
step: there who leads waits for HBM and who follows does not, and how far apart they stay depends on more than is known here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

CHUNKS = 16
"""Chunks in which the rows of a head move, at least."""
LEAST_CHUNK = 64
SHARE = 8
"""Chunks of a head's streams that a partition holds at the least: coarser ones would push each other out."""
WAVES = 48
"""Waves of blocks after which a launch is taken to go on as it did in the second half of them."""
LAG = 0.01
"""Share of a block's time by which the slowest SM falls behind the quickest."""
GOLDEN_RATIO = 0.6180339887498949
"""Its multiples, modulo 1, are spread evenly, in no order."""
ENDS, LOADS = 0, 1
"""What happens to a block, in the order of what happens at one time."""


@dataclass(frozen=True, slots=True)
class Block:
    """A thread block: the rows [first, end) of the streams of `head` that it goes over, and the bytes that it alone reads and writes."""

    head: int
    first: int
    end: int
    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that many blocks go over: read, or read and added to."""

    row_bytes: int
    adds: bool = False


class L2:
    """The chunks that each partition holds, in the order in which they came; and what it cost. Keys are integers."""

    def __init__(self, size_bytes: int, partitions: int) -> None:
        self.capacity = size_bytes / partitions
        self.again = 0
        """HBM bytes read of chunks that had been in the L2 before."""
        self.spilled = 0
        """HBM bytes of `store` and `add` pushed out."""
        self.parts: list[dict[int, tuple[int, bool]]] = [{} for _ in range(partitions)]
        self._used = [0] * partitions
        self._seen: set[int] = set()
        self._passing = 0

    def load(self, side: int, key: int, size: int) -> None:
        """Read by an SM of one side."""
        part = self.parts[side % len(self.parts)]
        if key in part:
            return
        if key in self._seen:
            if not any(key in other for other in self.parts):
                self.again += size
        else:
            self._seen.add(key)
        self._keep(side % len(self.parts), key, size, dirty=False)

    def store(self, key: int, size: int) -> None:
        """Written whole, so never read first."""
        self._seen.add(key)
        self._keep(key % len(self.parts), key, size, dirty=True)

    def add(self, key: int, size: int) -> None:
        """Read, changed and written, in the one place where it lies."""
        if key not in self.parts[key % len(self.parts)] and key in self._seen:
            self.again += size
        self.store(key, size)

    def pass_by(self, side: int, size: int) -> None:
        """Bytes that nobody touches again, but that push others out."""
        if size:
            self._passing -= 1
            self._keep(side % len(self.parts), self._passing, size, dirty=False)

    def _keep(self, place: int, key: int, size: int, dirty: bool) -> None:
        part = self.parts[place]
        if key in part:
            part[key] = (size, dirty or part[key][1])
            return
        part[key] = (size, dirty)
        self._used[place] += size
        while self._used[place] > self.capacity and len(part) > 1:
            gone, was_dirty = part.pop(next(iter(part)))
            self._used[place] -= gone
            self.spilled += gone * was_dirty


def chunk_rows(rows: int, streams: Sequence[Stream], capacity: float) -> int:
    """Rows of a chunk of a head's `rows`: a power of two."""
    row_bytes = sum(stream.row_bytes for stream in streams)
    chunk = LEAST_CHUNK
    while 2 * chunk * CHUNKS <= rows and 2 * chunk * row_bytes * SHARE <= capacity:
        chunk *= 2
    return chunk


def replay(
    l2: L2,
    blocks: Sequence[Block],
    streams: Sequence[Stream],
    slots: int,
    sm_count: int,
    chunk: int,
    *,
    down: bool = False,
) -> None:
    """Run a launch of `blocks` on `slots` places through the cache, each from its first row to its last or `down` from the last."""
    waiting = iter(blocks)
    places = min(slots, len(blocks))
    sides = [slot % sm_count % len(l2.parts) for slot in range(places)]
    longest = max((block.end - block.first for block in blocks), default=0)
    lag = LAG if longest * sum(stream.row_bytes for stream in streams) <= l2.capacity else 0.0
    lags = [lag * (slot % sm_count * GOLDEN_RATIO % 1) for slot in range(places)]
    moves = [(stream_key(number, 0, 0), chunk * stream.row_bytes, stream.adds) for number, stream in enumerate(streams)]
    running = [next(waiting) for _ in range(places)]
    at = [0] * places  # the chunk of stream 0 that each goes over next
    left = [0] * places  # chunks that it has still to go over
    due = [(0.0, LOADS, slot) for slot in range(places)]  # what happens next, where, in order; a chunk takes 1
    step = -1 if down else 1

    def span(block: Block) -> tuple[int, int]:
        return block.first // chunk, -(-block.end // chunk)

    def start(slot: int, block: Block) -> None:
        first, end = span(block)
        at[slot], left[slot] = stream_key(0, block.head, end - 1 if down else first), end - first

    for slot, block in enumerate(running):
        l2.pass_by(sides[slot], block.reads)
        start(slot, block)
    parts = [l2.parts[side] for side in sides]
    replace = heapq.heapreplace
    while due:
        now, event, slot = due[0]
        if event == LOADS:
            if left[slot] > 0:
                part, here = parts[slot], at[slot]
                for stream, size, adds in moves:
                    key = stream + here
                    if adds:
                        l2.add(key, size)
                    elif key not in part:  # seldom: so much quicker than `load` each time
                        l2.load(sides[slot], key, size)
                at[slot] = here + step
            left[slot] -= 1
            if left[slot] > 0:
                replace(due, (now + 1, LOADS, slot))
            else:
                first, end = span(running[slot])
                replace(due, (now + 1 + lags[slot] * (end - first), ENDS, slot))
            continue
        following = next(waiting, None)
        l2.pass_by(sides[slot], running[slot].writes + (following.reads if following else 0))
        if following is None:
            heapq.heappop(due)
        else:
            running[slot] = following
            start(slot, following)
            replace(due, (now, LOADS, slot))


def stream_key(stream: int, head: int, chunk: int) -> int:
    """A chunk's name. Neighbours lie in different partitions."""
    return (stream << 60) + (head << 30) + chunk


def heads_to_replay(heads: int, blocks_per_head: int, slots: int) -> int:
    """Heads whose blocks stand for those of all: enough for the launch to have found its pace."""
    return min(heads, -(-WAVES * slots // blocks_per_head))
