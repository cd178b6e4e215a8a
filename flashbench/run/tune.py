"""What tuning tries: the lists of the table that some problems read on this device, the shapes for each, and the problems themselves.

Nothing is tuned inside a measurement: what is found goes into the table of block shapes, which a later run reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashbench.errors import FlashbenchError, UsageError
from flashbench.kernels.blocks import BlockShape, address, candidate_blocks, family, kind_of, padded
from flashbench.kernels.tunable import TUNABLE, grid
from flashbench.records import Device, Problem

CHECK_POSITIONS = {"cuda": 512, "cpu": 128}
"""Length of the small problem on which a shape is checked; the remainder by the largest block is added, so that it compiles alike."""
LARGEST_BLOCK = 256
QUERY_HEADS_PER_KV_HEAD = 8
DECODE_TOKENS = 16
"""In decode, a query reads all the keys of its sequence: eight query heads share them, and there are more sequences than elsewhere."""


class TuningUnavailable(FlashbenchError):
    """No kernel can be timed here; the message says what is needed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to tune; sizes as a sweep's `tokens` and `hidden` give them."""

    kernels: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    seq_lens: tuple[int, ...]
    masks: tuple[str, ...]
    wide: bool = False
    tokens: int = 16384
    hidden: int = 2048


@dataclass(frozen=True, slots=True)
class Entry:
    """A list of the table, the shapes to try for it, and the problems to try them on."""

    kernel: str
    family: str
    kind: str
    width: int
    known: tuple[BlockShape, ...]
    """What the table has, best first."""
    shapes: tuple[BlockShape, ...]
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.family} {self.kind} {self.width}"


def entries(wanted: Wanted, device: Device) -> list[Entry]:
    """The lists of the table that the wanted problems read on this device. UsageError where one has no row and none is generated."""
    problems: dict[tuple[str, str, int], list[Problem]] = {}
    for kernel in wanted.kernels:
        for dtype in wanted.dtypes:
            for head_dim in wanted.head_dims:
                width = _width(kernel, dtype, max(head_dim), device, wanted.wide)
                problems.setdefault((kernel, kind_of(dtype), width), []).extend(
                    _problems(wanted, kernel, dtype, head_dim)
                )
    return [
        _entry(kernel, kind, width, tuple(dict.fromkeys(found)), device, wanted.wide)
        for (kernel, kind, width), found in problems.items()
    ]


def _width(kernel: str, dtype: str, head_dim: int, device: Device, wide: bool) -> int:
    if device.kind == "cpu":  # nothing is written, and the interpreter's one list is for all widths
        return padded(head_dim)
    try:
        return address(device.capability, dtype, head_dim, kernel)[2]
    except UsageError:
        if not wide:
            raise
        return padded(head_dim)


def _problems(wanted: Wanted, kernel: str, dtype: str, head_dim: tuple[int, int]) -> Iterator[Problem]:
    mode = TUNABLE[kernel].mode
    heads = max(1, wanted.hidden // head_dim[0])
    heads_kv = max(1, heads // QUERY_HEADS_PER_KV_HEAD) if mode == "decode" else heads
    for seq_len in wanted.seq_lens:
        for mask in ("none",) if mode == "decode" else wanted.masks:
            seq_q = 1 if mode == "decode" else seq_len
            tokens = wanted.tokens * (DECODE_TOKENS if mode == "decode" else 1)
            batch = max(1, tokens // seq_len)
            yield Problem(batch, heads, heads_kv, seq_q, seq_len, *head_dim, dtype, mask, mode)


def _entry(kernel: str, kind: str, width: int, problems: tuple[Problem, ...], device: Device, wide: bool) -> Entry:
    capability = device.capability
    # The interpreter can check every shape that a GPU of any family would be given.
    families = [capability] if device.kind == "cuda" else [(8, 0), (9, 0), (10, 0), None]
    known: dict[BlockShape, None] = {}
    for one in families:
        try:
            known |= dict.fromkeys(candidate_blocks(one, problems[0].dtype, width, kernel))
        except UsageError:
            if device.kind == "cuda" and not wide:
                raise
    has_descriptors = capability is None or family(capability) != "sm_80"
    tried = dict.fromkeys([*known, *(grid(TUNABLE[kernel], has_descriptors, width) if wide else ())])
    readable = has_descriptors and not any(
        head_dim * problem.element_bytes % 16
        for problem in problems
        for head_dim in (problem.head_dim, problem.head_dim_v)
    )
    shapes = tuple(shape for shape in tried if shape.descriptors <= readable)
    return Entry(kernel, family(capability), kind, width, tuple(known), shapes, problems)


def small(problem: Problem, kind: str) -> Problem:
    """A problem for the check that compiles to the same kernel: the same dtype, mask, head dimension and remainders of the lengths."""

    def length(seq: int) -> int:
        return min(seq, CHECK_POSITIONS[kind] + seq % LARGEST_BLOCK)

    kv_heads = min(2, problem.heads_kv)
    seq_kv = length(problem.seq_kv)
    mask = problem.mask
    if problem.window is not None:  # one that shows every key is compiled as causal, and the others as windows
        mask = "causal" if problem.window >= problem.seq_kv else f"window:{min(problem.window, max(1, seq_kv // 2))}"
    return replace(
        problem,
        batch=2,
        heads_q=kv_heads * (problem.heads_q // problem.heads_kv),
        heads_kv=kv_heads,
        seq_q=length(problem.seq_q),
        seq_kv=seq_kv,
        mask=mask,
    )


def checks(entry: Entry, kind: str) -> list[tuple[Entry, BlockShape, Problem]]:
    """Every check of an entry: each shape on each of the small problems."""
    problems = dict.fromkeys(small(problem, kind) for problem in entry.problems)
    return [(entry, shape, problem) for shape in entry.shapes for problem in problems]
