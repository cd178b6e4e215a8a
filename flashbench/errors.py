"""User-facing errors: one sentence that says what happened, what is known and what to do.

Exit codes follow README, "Exit codes": 2 usage or configuration, 3 no trustworthy verdict, 4 a failed row or an internal error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlashbenchError(Exception):
    """An error that the command line prints as one line and turns into `exit_code`."""

    exit_code = 4


class UsageError(FlashbenchError):
    """A wrong option, name or value; nothing was run."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file that cannot be used; the message starts with `file:line:` where the line is known."""


class StoreError(FlashbenchError):
    """Results on disk that are damaged, of a newer schema, or not there."""

    exit_code = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint like `; did you mean 'causal'?`, or an empty string when nothing is close. Of equally close names, the first."""
    matcher = difflib.SequenceMatcher(b=name.lower())

    def closeness(word: str) -> float:
        matcher.set_seq1(word)
        return matcher.ratio()

    best = max(known, key=closeness, default="")
    return f"; did you mean '{best}'?" if closeness(best) >= 0.5 else ""
