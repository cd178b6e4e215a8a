"""The anchors of a run: times of reference kernels, measured in every round in the process of the cases.

    anchors.jsonl    one line per round and anchor, beside rows.jsonl

They are no rows: nobody asked for them, and tables and rooflines do not show them. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flashbench.errors import UsageError
from flashbench.records import from_plain, to_plain

ANCHOR_FILE = "anchors.jsonl"


@dataclass(frozen=True, slots=True)
class Anchor:
    """One reference kernel in one process."""

    name: str
    """gemm or copy."""
    samples_ms: tuple[float, ...]
    method: str | None = None
    sm_clock_mhz: tuple[int, int] | None = None
    """Lowest and highest seen."""


def append_anchors(run: Path, round_index: int, anchors: Sequence[Anchor]) -> None:
    """Add a round's anchors to the run's folder; UsageError when the disk refuses."""
    lines = [json.dumps({"round": round_index, **to_plain(anchor)}, allow_nan=False) + "\n" for anchor in anchors]
    try:
        with (run / ANCHOR_FILE).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError as error:
        raise UsageError(f"cannot write the anchors of '{run}' ({error.strerror})") from error


def load_anchors(run: Path) -> dict[str, dict[int, float]]:
    """Median times (ms) by anchor and round; nothing for a run without them. Half a line, which a kill leaves, is left out.

    Of a round that a crash or an interruption made measure them twice, the last ones count.
    """
    found: dict[str, dict[int, float]] = {}
    path = run / ANCHOR_FILE
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            plain = json.loads(line)
            anchor, round_index = from_plain(Anchor, plain), int(plain["round"])
            found.setdefault(anchor.name, {})[round_index] = float(median(anchor.samples_ms))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # a round without its anchor does not count, and the comparison says so
    return found
