"""What `baseline update` and `baseline show` do once their options are parsed."""

from __future__ import annotations

import getpass
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from flashbench.analysis.gate.stages import judge, overall
from flashbench.analysis.statistics import over_rounds
from flashbench.cli.gating import stored_rules, whole_run
from flashbench.errors import StoreError, UsageError
from flashbench.records import FAILED_STATUSES
from flashbench.report.verdicts import render_text
from flashbench.store.baseline import Baseline, baseline_changes, baseline_path, read_baseline, write_baseline
from flashbench.store.side import Side, side_of_run, typical_ms, worst_status


def store(run_path: Path, why: str, who: str | None, *, accept: bool, name: str | None, root: Path) -> int:
    """Write the baseline of a run and return 0, or say what speaks against it and return that verdict's code."""
    if not why.strip():
        raise UsageError("--why: say in a few words why the baseline changes; a reviewer reads it")
    run = whole_run(run_path)
    side = side_of_run(run)
    path = baseline_path(root, run.device_id, name or str(run.header.get("name") or "run"))
    before = read_baseline(path) if path.exists() else None
    rules = [one.narrowed(side.cases) for one in stored_rules(run.header)]
    against = _too_little(side, rules[0].min_rounds)
    if against is None and before is not None:
        screening_rounds = (run.header.get("gate") or {}).get("screening_rounds")
        comparisons = [judge(before.side, side, one, "stored", screening_rounds) for one in rules]
        sys.stdout.write("\n".join(render_text(comparison, passes=False) for comparison in comparisons))
        code, line = overall(comparisons)
        against = (code, line) if code else None
    if against is not None and not accept:
        code, line = against
        print(f"not stored: {line} (exit code {code}); --accept stores it all the same", file=sys.stderr)
        return code
    written = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    write_baseline(path, Baseline(side, path.stem, run.path.name, who or _me(), why.strip(), written))
    for line in baseline_changes(before.side if before else None, side):
        print(line)
    print(f"stored {len(side.cases)} cases in {path}; review it, and commit it", file=sys.stderr)
    return 0


def _too_little(side: Side, min_rounds: int) -> tuple[int, str] | None:
    """Why a run would be no baseline at all: a case that failed, or rounds too few to be compared with."""
    for key, rounds in side.cases.items():
        status = worst_status(rounds)
        if status in FAILED_STATUSES:
            reason = next((seen.reason for seen in rounds if seen.status == status), None)
            return 4, f"failed: {key}: {status}: {reason}"
    fewest = min(side.cases.items(), key=lambda item: len(item[1]))
    if len(fewest[1]) < min_rounds:
        return (
            3,
            f"too few rounds: {len(fewest[1])} of {fewest[0]}, at least {min_rounds} are needed; measure it with `flashbench gate`",
        )
    return None


def _me() -> str:
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False)
        name = done.stdout.strip()
    except OSError:
        name = ""
    try:
        return name or getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"


def show_all(root: Path) -> str:
    """A line for each stored baseline; StoreError when there is none."""
    paths = sorted(root.glob("*/*.jsonl"))
    if not paths:
        raise StoreError(f"no baseline in '{root}'; store one with `flashbench baseline update RUN`")
    return "\n".join(
        f"{path}: {len(found.side.cases)} cases; {_history(found)}" for path in paths for found in [read_baseline(path)]
    )


def show_one(path: Path) -> str:
    """History, device, versions, anchors and cases of one baseline."""
    found = read_baseline(path)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found.side.versions.items()))
    lines = [f"{path}: {_history(found)}", f"device {found.side.identity.device}; {versions}"]
    rows = [("case", "status", "median ms", "sd between rounds", "rounds")]
    for name, times in sorted(found.side.anchors.items()):
        rows.append((f"anchor {name}", "ok", *_figures(list(times.values()))))
    for key, rounds in found.side.cases.items():
        times_ms = [seen.median_ms for seen in rounds if seen.median_ms]
        median_ms = typical_ms(rounds)
        figures = ("-", "-", str(len(rounds))) if median_ms is None else _figures(times_ms)
        rows.append((key, worst_status(rounds), *figures))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(lines + ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows])


def _figures(times_ms: list[float]) -> tuple[str, str, str]:
    center, deviation = over_rounds(times_ms)
    spread = f"{100 * deviation / center:.2f} %" if deviation is not None and center else "-"
    return ("-" if center is None else f"{center:.4g}", spread, str(len(times_ms)))


def _history(found: Baseline) -> str:
    who, when = found.who or "somebody", found.written or "at some time"
    return f"stored by {who}, {when}, from {found.run or 'an unknown run'}: {found.why or 'no reason given'}"
