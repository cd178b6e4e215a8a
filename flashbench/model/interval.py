"""Bytes that cannot be known exactly: an interval with an estimate inside, and the two laws by which a cache narrows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """HBM bytes of one call. `low`: everything moved once; `high`: nothing found in the L2; low <= estimate <= high."""

    low: int
    estimate: int
    high: int
    written: int = 0
    """The writes in `estimate`, as they leave the L2; the rest is read."""

    @property
    def read(self) -> int:
        """The reads in `estimate`."""
        return self.estimate - self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.low + other.low,
            self.estimate + other.estimate,
            self.high + other.high,
            self.written + other.written,
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """What of a device the byte models use; None means not known, and then nothing is assumed to stay in the L2."""

    l2_bytes: int | None = None
    sm_count: int | None = None
    l2_partitions: int = 1
    """Parts of the L2 that each cache what the SMs connected to them read, so that data which all SMs read is held in each."""

    def again(self, reads: float, working_set: float, shared: bool = False) -> float:
        """HBM bytes of `reads` bytes that are read (or written) again while `working_set` bytes pass between.

        Blocks that go round the working set independently find the share of it that the L2 holds; when blocks of all SMs share it,
        that is one partition's worth.
        """
        if not self.l2_bytes or not working_set:
            return reads
        held = self.l2_bytes / (self.l2_partitions if shared else 1)
        return reads * max(0.0, 1 - held / working_set)

    def places(self, blocks_per_sm: int) -> int | None:
        """Thread blocks that run at a time."""
        return self.sm_count * blocks_per_sm if self.sm_count else None

    def cycled(self, reads: float, working_set: float) -> float:
        """HBM bytes of `reads` bytes that are read or written again, each after all of `working_set` has been: least-recently-used,
        all of them or none."""
        return reads if not self.l2_bytes or working_set > self.l2_bytes else 0.0

    def handed_over(self, matrix: float) -> float:
        """Share of a matrix that goes through HBM when one kernel writes it and the next reads it, in order, writing another as large.

        Least-recently-used: between the write and the read of the element at share x of the matrix pass (1 + x) matrices, so it
        is still there while (1 + x) · matrix <= L2. All of it spills when the matrix alone fills the L2, none when two fit.
        """
        if not self.l2_bytes or not matrix:
            return 1.0
        return min(1.0, max(0.0, 2 - self.l2_bytes / matrix))


def streamed(blocks: list[tuple[int, int]], heads: int, slots: int | None) -> int:
    """Rows read when blocks that run together stream the same rows nearly in step: the union of their ranges, wave after wave.

    `blocks` are the ranges [first, end) of the blocks of one head, not falling; `heads` heads go over the same rows, and `slots`
    blocks run at a time: as many whole heads as fit, or else part of one. Unknown slots: all run together.
    """
    count = len(blocks)
    everything = blocks[-1][1] - blocks[0][0]
    if slots is None:
        return everything
    if slots >= count:
        return everything * -(-heads // (slots // count))
    waves = range(0, count, slots)
    return heads * sum(blocks[min(start + slots, count) - 1][1] - blocks[start][0] for start in waves)


def lengths(blocks: list[tuple[int, int]]) -> int:
    """Rows read when no block finds what another has read."""
    return sum(end - first for first, end in blocks)
