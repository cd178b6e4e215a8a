"""The cases that a configuration asks for: the product of its axes, less `exclude`, and `include`."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashbench.config.scalars import Pair
from flashbench.errors import ConfigError, nearest
from flashbench.records import Case, Problem

if TYPE_CHECKING:
    from flashbench.config.schema import Config
    from flashbench.config.source import KeyPath
    from flashbench.config.sweep import Axes, Exclusion

MAX_CASES = 100_000
"""More than this is a slip in an axis, not a sweep that anyone waits for."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Cases by problem, and within a problem by provider, in the order of the file; `notes` say what matched nothing."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()


def expand(config: Config, known_providers: Sequence[str] | None = None) -> Expansion:
    """Every case of `config`, each once. Device and providers' limits play no part here.

    Names of providers are checked when `known_providers` is given; `file.py:function` always passes. Raises ConfigError with the line
    for an unknown provider, for a sweep of nothing or of more than MAX_CASES, and for an override of the gate that matches no case.
    """
    if known_providers is not None:
        _check_names(config, known_providers)
    blocks = [*([config.problems] if config.problems else []), *config.include]
    total = sum(_size(block) * len(getattr(block, "providers", ()) or config.providers) for block in blocks)
    if total > MAX_CASES:
        raise ConfigError(
            f"{config.where('problems')}the axes make {total:,} cases, more than {MAX_CASES:,}; shorten a list"
        )

    used: set[int] = set()
    cases: dict[Case, None] = {}
    for problem in problems(config.problems) if config.problems else ():
        for provider in config.providers:
            case = Case(provider, problem)
            matching = {i for i, exclusion in enumerate(config.exclude) if matches(exclusion, case)}
            used |= matching
            if not matching:
                cases[case] = None
    for block in config.include:
        for problem in problems(block):
            cases |= dict.fromkeys(Case(provider, problem) for provider in block.providers or config.providers)
    if not cases:
        if used:
            raise ConfigError(f"{config.where('exclude')}excludes every case; nothing is left to run")
        raise ConfigError(
            f"{config.where()}no problems: add 'problems' with at least dtype, seq_len, head_dim and heads"
        )

    notes = list(config.notes)
    if not config.narrowed:
        notes += [f"{config.where('exclude', i)}matches no case" for i in range(len(config.exclude)) if i not in used]
        _check_overrides(config, cases)
    return Expansion(tuple(cases), tuple(notes))


def problems(axes: Axes) -> Iterator[Problem]:
    """The product of the axes, mode outermost and length innermost, so that a table of cases reads along the lengths."""
    lengths = axes.seq_len or tuple(itertools.starmap(Pair, itertools.product(axes.seq_q, axes.seq_kv)))
    for mode, dtype, head_dim in itertools.product(axes.mode, axes.dtype, axes.head_dim):
        heads_axis = axes.heads or tuple(
            Pair(hidden // head_dim.first, hidden // head_dim.first) for hidden in axes.hidden
        )
        for heads, mask, batch, page_size, length in itertools.product(
            heads_axis, axes.mask, axes.batch or axes.tokens, axes.page_size or (None,), lengths
        ):
            seq = _lengths(length, mode) if axes.seq_len else length
            yield Problem(
                batch=batch if axes.batch else max(1, batch // max(seq)),
                heads_q=heads.first,
                heads_kv=heads.second,
                seq_q=seq.first,
                seq_kv=seq.second,
                head_dim=head_dim.first,
                head_dim_v=head_dim.second,
                dtype=dtype,
                mask=mask,
                mode=mode,
                page_size=page_size,
            )


def _lengths(length: Pair, mode: str) -> Pair:
    """Decoding asks with one query per sequence, so a single seq_len is the number of keys; `4/8k` is taken as written."""
    return Pair(1, length.second) if mode == "decode" and length.first == length.second else length


def matches(exclusion: Exclusion, case: Case) -> bool:
    """Whether the case has, for every key of the exclusion, one of its values; a value means what it means in `problems`."""
    p = case.problem
    found: dict[str, object] = {
        "provider": case.provider,
        "mode": p.mode,
        "dtype": p.dtype,
        "seq_q": p.seq_q,
        "seq_kv": p.seq_kv,
        "head_dim": Pair(p.head_dim, p.head_dim_v),
        "head_dim_v": p.head_dim_v,
        "mask": p.mask,
        "batch": p.batch,
        "heads": Pair(p.heads_q, p.heads_kv),
        "heads_q": p.heads_q,
        "heads_kv": p.heads_kv,
        "page_size": p.page_size,
    }
    for key in exclusion.model_fields_set:
        wanted = getattr(exclusion, key)
        if key == "seq_len":
            if Pair(p.seq_q, p.seq_kv) not in {_lengths(length, p.mode) for length in wanted}:
                return False
        elif found[key] not in wanted:
            return False
    return True


def _size(axes: Axes) -> int:
    lengths = len(axes.seq_len) or len(axes.seq_q) * len(axes.seq_kv)
    either = (axes.heads or axes.hidden, axes.batch or axes.tokens, axes.page_size or (None,))
    return lengths * math.prod(map(len, (axes.mode, axes.dtype, axes.head_dim, axes.mask, *either)))


def _check_names(config: Config, known: Sequence[str]) -> None:
    """A typo must not quietly run a smaller sweep."""
    named: list[tuple[KeyPath, str]] = [(("providers", i), name) for i, name in enumerate(config.providers)]
    for number, block in enumerate(config.include):
        named += [(("include", number, "providers", i), name) for i, name in enumerate(block.providers)]
    for path, name in named:
        if name not in known and ":" not in name and not name.endswith(".py"):
            raise ConfigError(
                f"{config.where(*path)}unknown provider '{name}'{nearest(name, known)} "
                f"(known: {', '.join(known)}, or file.py:function)"
            )


def _check_overrides(config: Config, cases: dict[Case, None]) -> None:
    for glob in config.gate.overrides:
        if not any(fnmatch.fnmatchcase(case.key, glob) for case in cases):
            example = next(iter(cases)).key
            raise ConfigError(
                f"{config.where('gate', 'overrides', glob)}matches no case; a case reads like '{example}'"
            )
