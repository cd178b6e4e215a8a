"""The vocabulary: what is asked (Problem, Case), what was seen (Row and its parts), and where (Device).

Standard library only: every other module may import this one. Sizes are in elements, times in milliseconds, memory in bytes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from flashbench.errors import UsageError, nearest

Dtype = Literal["bf16", "fp16", "fp32", "tf32", "fp8"]
Mode = Literal["forward", "backward", "forward_backward", "decode"]
Status = Literal["ok", "checked", "unsupported", "oom", "incorrect", "invalid", "timeout", "crashed", "error"]

DTYPES: tuple[str, ...] = get_args(Dtype)
MODES: tuple[str, ...] = get_args(Mode)
STATUSES: tuple[str, ...] = get_args(Status)
FAILED_STATUSES = frozenset({"incorrect", "invalid", "timeout", "crashed", "error"})

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
"""Bytes of one element as stored; tf32 is fp32 tensors with tf32 products."""

MASK_NAMES = ("none", "causal", "window:W")


def parse_mask(text: str) -> str:
    """The canonical form of a mask: `none`, `causal` or `window:W` with W a positive number of keys.

    Raises UsageError for anything else, naming the nearest known mask.
    """
    if text in ("none", "causal"):
        return text
    match = re.fullmatch(r"window:(\d+)(k?)", text)
    if match:
        width = int(match[1]) * (1024 if match[2] else 1)
        if width > 0:
            return f"window:{width}"
        raise UsageError("mask 'window:0' would hide every key; use 'none', or a window of at least 1")
    hint = nearest(text, ("none", "causal", "window:1024"))
    raise UsageError(f"unknown mask '{text}'{hint} (known: {', '.join(MASK_NAMES)})")


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention problem: q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (..., head_dim_v).

    Masks are aligned bottom-right: the last query sees every key, and `window:W` shows it the last W keys, itself included.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str = "none"
    mode: str = "forward"
    page_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads_q % self.heads_kv:
            raise UsageError(
                f"{self.heads_q} query heads do not share {self.heads_kv} key/value heads evenly; "
                "use a number of query heads that is a multiple of it"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype '{self.dtype}'{nearest(self.dtype, DTYPES)} (known: {', '.join(DTYPES)})")
        if self.mode not in MODES:
            raise UsageError(f"unknown mode '{self.mode}'{nearest(self.mode, MODES)} (known: {', '.join(MODES)})")
        if parse_mask(self.mask) != self.mask:
            raise UsageError(f"mask '{self.mask}' is not in its canonical form '{parse_mask(self.mask)}'")

    @property
    def window(self) -> int | None:
        """Width W of a sliding window in keys, or None."""
        return int(self.mask.removeprefix("window:")) if self.mask.startswith("window:") else None

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """The problem as a person reads it; what has its usual value is left out, so that a later axis orphans no baseline."""

        def pair(first: int, second: int) -> str:
            return str(first) if first == second else f"{first}/{second}"

        words = [
            self.mode,
            self.dtype,
            f"b{self.batch}",
            f"h{pair(self.heads_q, self.heads_kv)}",
            f"s{pair(self.seq_q, self.seq_kv)}",
            f"d{pair(self.head_dim, self.head_dim_v)}",
        ]
        if self.mask != "none":
            words.append(self.mask)
        if self.page_size is not None:
            words.append(f"page{self.page_size}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Case:
    """A provider on a problem. `key` names it in files, baselines and on the command line (`--repro`)."""

    provider: str
    problem: Problem

    @property
    def key(self) -> str:
        return f"{self.provider} {self.problem.label}"

    @classmethod
    def from_key(cls, key: str) -> Case:
        """The case that `key` names; UsageError when the text is not a key."""
        match = re.fullmatch(
            r"(?P<provider>\S+) (?P<mode>\w+) (?P<dtype>\w+) b(?P<batch>\d+) h(?P<heads>\d+(?:/\d+)?) s(?P<seq>\d+(?:/\d+)?) "
            r"d(?P<dim>\d+(?:/\d+)?)(?: (?P<mask>causal|window:\d+))?(?: page(?P<page>\d+))?",
            key.strip(),
        )
        if not match:
            example = "flash-v2 forward bf16 b4 h16 s4096 d128 causal"
            raise UsageError(f"'{key}' is not a case key; a key reads like '{example}'")

        def pair(text: str) -> tuple[int, int]:
            first, _, second = text.partition("/")
            return int(first), int(second or first)

        heads, seq, dim = pair(match["heads"]), pair(match["seq"]), pair(match["dim"])
        problem = Problem(
            batch=int(match["batch"]),
            heads_q=heads[0],
            heads_kv=heads[1],
            seq_q=seq[0],
            seq_kv=seq[1],
            head_dim=dim[0],
            head_dim_v=dim[1],
            dtype=match["dtype"],
            mask=match["mask"] or "none",
            mode=match["mode"],
            page_size=int(match["page"]) if match["page"] else None,
        )
        return cls(match["provider"], problem)


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker found on the machine; the parent plans with it and never imports torch. None means not readable here."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    index: int | None = None
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    l2_bytes: int | None = None
    shared_bytes_per_block: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_bus_bits: int | None = None
    power_limit_w: float | None = None
    mig: bool | None = None
    sdpa_backends: tuple[str, ...] = ()
    triton_interpreter: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    """python, torch, triton, cuda, cudnn, driver, and any provider's library."""


@dataclass(frozen=True, slots=True)
class Check:
    """Error of a case's outputs against the float64 reference; in backward the worst of output and gradients."""

    worst: str
    """Which tensor the figures are of: out, dq, dk or dv."""
    error_norm: float
    """||out - reference|| / ||reference||."""
    error_max: float
    """max |out - reference|."""
    tolerance_norm: float
    tolerance_max: float
    naive_error_norm: float
    """The same error of plain attention in the case's own dtype, from which the tolerances are taken."""
    naive_error_max: float
    reference_dtype: str
    run_to_run_max: float | None = None
    """Largest difference between two calls on the same inputs; None when only one was made."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How the samples of a row were taken; the samples themselves (ms) stand in the run's binary file."""

    method: str
    """events, graph, profiler, or wall (CPU)."""
    l2: str
    regime: str
    sample_count: int
    warmup_ms: float
    discarded: int = 0
    """Samples that did not count because the spin ended before the last launch returned."""
    duty_cycle: float | None = None
    """Share of the sampling time in which the measured call ran."""
    converged: bool | None = None
    """Whether the median's confidence interval closed before the budget ended."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Allocator figures of one call in a pass of its own, in bytes."""

    before_bytes: int
    """Live before the call: inputs and what the provider keeps."""
    peak_bytes: int
    """Highest during the call, `before_bytes` included."""


@dataclass(frozen=True, slots=True)
class State:
    """What NVML said while a row was sampled; each field is None on its own where it cannot be read."""

    sm_clock_mhz: tuple[int, int] | None = None
    """Lowest and highest seen."""
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    other_processes: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One visit of one case in one round. What is not known is None, never 0 or NaN."""

    case: Case
    round: int
    status: Status
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    started: str | None = None
    """UTC, ISO 8601."""
    seconds: float | None = None
    """Wall time of the whole visit, compilation and check included."""
    stage_seconds: dict[str, float] | None = None
    """Where that time went: reference (first provider of a problem only), first call, check, memory, time, and the opt-in passes."""
    first_call_ms: float | None = None
    """The first call, in which compilation and autotuning happen."""
    backend: str | None = None
    """Which implementation really ran, where the provider leaves the choice to its library."""
    check: Check | None = None
    timing: Timing | None = None
    memory: Memory | None = None
    state: State | None = None
    launch: dict[str, Any] | None = None
    """For the project's own kernels: block shape, warps, stages, registers, spills, shared memory."""
    energy_j: float | None = None
    """Joules per call, idle power subtracted; opt-in."""
    cross_check: dict[str, float] | None = None
    """Medians in ms of a few more launches by events, by the profiler on the same launches, and by a graph; opt-in."""

    @property
    def key(self) -> str:
        return self.case.key


T = TypeVar("T")


def to_plain(record: Any) -> Any:
    """A record as dicts, lists and scalars that JSON can hold; fields that are None are left out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        pairs = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
        return {name: to_plain(value) for name, value in pairs if value is not None}
    if isinstance(record, dict):
        return {str(k): to_plain(v) for k, v in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_plain(v) for v in record]
    return record


def from_plain(cls: type[T], data: dict[str, Any]) -> T:
    """The inverse of `to_plain`. Unknown fields are ignored and missing optional ones are None, so that older files load."""
    nested = _NESTED.get(cls, {})
    known: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name not in data:
            continue
        value = data[f.name]
        if f.name in nested and value is not None:
            value = from_plain(nested[f.name], value)
        elif isinstance(value, list):
            value = tuple(value)
        known[f.name] = value
    return cls(**known)


_NESTED: dict[type, dict[str, type]] = {
    Case: {"problem": Problem},
    Row: {"case": Case, "check": Check, "timing": Timing, "memory": Memory, "state": State},
}
