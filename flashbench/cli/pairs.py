"""The two runs of one `ab`, found again from either: what `ab --resume` goes on with."""

from __future__ import annotations

import json
from pathlib import Path

from flashbench.errors import StoreError, UsageError
from flashbench.store.read import HEADER, Run, load_run

SIDES = ("base", "new")


def runs_of_pair(path: Path) -> tuple[Run, Run]:
    """Base and new run of the `ab` that the run at `path` is one side of; UsageError when it is none, StoreError without the other side."""
    run = load_run(path)
    pair = run.header.get("pair")
    if pair is None:
        raise UsageError(
            f"--resume: '{run.path}' is no side of an `ab`; `sweep --resume` or `gate --resume` goes on with it"
        )
    sides = {}
    for header in sorted(run.path.parent.glob(f"*/{HEADER}")):
        if _pair_of(header) == pair:
            found = load_run(header.parent)
            sides[found.header.get("side")] = found
    for side in SIDES:
        if side not in sides:
            raise StoreError(
                f"the {side} side of '{run.path}' is not beside it in '{run.path.parent}'; start a new `ab`"
            )
    return sides["base"], sides["new"]


def _pair_of(header: Path) -> object:
    try:
        return json.loads(header.read_bytes()).get("pair")
    except (OSError, ValueError, AttributeError):  # another run's damage is not this one's
        return None
