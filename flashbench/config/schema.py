"""What a configuration may say: the whole file, how to measure, and when a gate fails; and its JSON Schema for editors.

Values are normalised on the way in (`4k` is 4096, a scalar is a list of one), so that nothing downstream parses text.
"""

from __future__ import annotations

import fnmatch
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from flashbench.config import scalars
from flashbench.config.fields import (
    Block,
    Count,
    Fraction,
    Length,
    Many,
    Number,
    Positive,
    Provider,
    Text,
    Truth,
    Width,
    one_of,
    refuse,
)
from flashbench.config.source import Document, KeyPath, Place
from flashbench.config.sweep import Axes, Exclusion, Inclusion


def _at_least_two(count: int) -> int:
    if count < 2:
        raise ValueError("is too few: a spread needs at least 2")
    return count


class Measure(Block):
    """How a case is measured."""

    l2: Annotated[Literal["cold", "warm"], one_of("state of the L2 cache", "cold", "warm")] | None = None
    """Not given: cold on a GPU, warm on a CPU."""
    regime: Annotated[Literal["isolated", "sustained"], one_of("load regime", "isolated", "sustained")] = "isolated"
    timer: Annotated[
        Literal["auto", "events", "graph", "profiler"], one_of("timer", "auto", "events", "graph", "profiler")
    ] = "auto"
    """Not given: by the call's duration. A CPU has one only."""
    min_samples: Annotated[Length, AfterValidator(_at_least_two)] = 20
    confidence_width: Width = 0.005
    """Sampling stops when the confidence interval of the median is this narrow, as a fraction of the median."""
    max_seconds: Positive = 2.0
    """... or when this much time went into a case."""
    rounds: Length | None = None
    """Worker processes that each visit every case. Not given: 1, or 6 under gate and ab."""
    timeout_seconds: Positive = 120.0
    """A case that takes longer has hung."""
    warmup_ms: Number | None = None
    """Not given: until time and clock are steady."""
    seed: Count = 0
    energy: Truth = False
    """Measure joules per call, in a pass of its own."""
    cross_check: Truth = False
    """Time a few launches by events and the profiler at once, and by a graph: for whoever doubts the times."""

    def round_count(self, gate: bool = False) -> int:
        """Rounds to run: as configured, or else 1, and 6 under a gate."""
        return self.rounds or (6 if gate else 1)


class Limits(NamedTuple):
    """How much slower a case may get: fractions of the base time, (new - base) / base, and an absolute floor in microseconds."""

    margin: float
    stored_margin: float
    floor_us: float


class Override(Block):
    """Other limits for the cases whose key matches a glob."""

    margin: Fraction | None = None
    stored_margin: Fraction | None = None
    floor_us: Number | None = None


FailOn = Annotated[
    Literal["regression", "failed", "missing", "inconclusive", "new"],
    one_of("verdict to fail on", "regression", "failed", "missing", "inconclusive", "new"),
]


class Gate(Block):
    """When a comparison fails."""

    margin: Fraction = 0.02
    """Against a base measured in the same session; (new - base) / base must exceed it."""
    stored_margin: Fraction = 0.05
    """Against a baseline stored earlier."""
    floor_us: Number = 1.0
    """And the case must be slower by more than this many microseconds."""
    overrides: dict[str, Override] = Field(default_factory=dict)
    """Limits for cases whose key matches a glob; where several match, the later one decides."""
    fail_on: Many[FailOn] = ("regression", "failed", "missing")
    allow_missing: Truth = False
    min_cases: Count = 1
    """Fewer cases in common than this is no verdict."""
    metrics: Many[Text] = ("time",)

    def limits_for(self, key: str) -> Limits:
        """The limits of the case with this key."""
        limits = Limits(self.margin, self.stored_margin, self.floor_us)
        for glob, override in self.overrides.items():
            if fnmatch.fnmatchcase(key, glob):
                given = {name: getattr(override, name) for name in Limits._fields}
                limits = limits._replace(**{name: value for name, value in given.items() if value is not None})
        return limits


def _version(value: object) -> int:
    if type(value) is int and value == 1:
        return 1
    raise ValueError("is not a version of the configuration that this flashbench reads; it reads version 1")


def _blocks(value: object) -> object:
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("must be a list of mappings, as in [{dtype: fp16, head_dim: 256}]")
    return value


class Config(Block):
    """A sweep: which providers, on which problems, measured how, and when a gate fails."""

    extends: Annotated[str | None, Field(exclude=True)] = None
    """Base file, relative to this one: mappings are merged, lists replaced. Merged in before anything is validated."""
    version: Annotated[Literal[1], BeforeValidator(_version)] = 1
    name: Annotated[str, BeforeValidator(scalars.run_name)] = "run"
    """Part of the name of the results' folder; the file's own name when not given."""
    device: Annotated[str, BeforeValidator(scalars.device)] = "auto"
    """auto, cpu, cuda, cuda:1, or a GPU's UUID."""
    providers: Many[Provider]
    problems: Axes | None = None
    exclude: Annotated[tuple[Exclusion, ...], BeforeValidator(_blocks)] = ()
    include: Annotated[tuple[Inclusion, ...], BeforeValidator(_blocks)] = ()
    measure: Measure = Measure()
    gate: Gate = Gate()

    _places: dict[KeyPath, Place] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _narrowed: bool = PrivateAttr(default=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What reading the configuration left out, in words."""
        return self._notes

    @property
    def narrowed(self) -> bool:
        """Whether the command line replaced providers or axes, so that parts of the file may match nothing."""
        return self._narrowed

    def where(self, *path: str | int) -> str:
        """How a message about the value at `path` begins: `forward.yaml:7: problems.hidden: `."""
        found, place = Document({}, self._places).locate(path)
        return place.prefix if place.line is None else f"{place.prefix}{key_text(found)}"

    def resolved(self) -> dict[str, Any]:
        """Plain data for run.json and `config show`: every default written out, and accepted again as a configuration."""
        plain: dict[str, Any] = _without_nothing(self.model_dump(mode="json"))
        return plain


def key_text(path: KeyPath) -> str:
    """`problems.seq_len[1]: `, or nothing for the whole file."""
    text = "".join(f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]" for step in path)
    return f"{text.removeprefix('.')}: " if text else ""


def _without_nothing(data: Any) -> Any:
    if isinstance(data, dict):
        plain = {key: _without_nothing(value) for key, value in data.items()}
        return {key: value for key, value in plain.items() if value not in (None, [], {})}
    return [_without_nothing(item) for item in data] if isinstance(data, list) else data


def json_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, for completion in editors. It requires nothing that a base file may give."""
    schema = Config.model_json_schema()
    for block in (schema, schema["$defs"]["Axes"]):
        block.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "flashbench configuration"}
