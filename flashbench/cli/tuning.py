"""What `flashbench tune` does once its options are parsed: run the trials, show them, keep them, write the table."""

from __future__ import annotations

import importlib.resources
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashbench.analysis.ranking import rank
from flashbench.analysis.statistics import median
from flashbench.errors import FlashbenchError, StoreError, UsageError, nearest
from flashbench.kernels.blocks import BlockShape, block_table, read_table, table_text
from flashbench.kernels.shape_file import rewritten
from flashbench.kernels.tunable import TUNABLE
from flashbench.records import FAILED_STATUSES, Device, Problem, to_plain
from flashbench.run.trials import RULE, Found, check_all, time_all, workers
from flashbench.run.tune import Entry, checks

KEPT = 8
"""Most shapes that a list gains or keeps for their rank; what the table had stays, behind."""
CHECK_SECONDS_EACH, TIME_SECONDS_EACH, START_SECONDS = 4.0, 0.25, 15.0
"""What a trial takes, and the workers before it, for the estimate."""
TABLE = "block_shapes.yaml"
PACKAGE = "package"


def kernels(words: Sequence[str]) -> tuple[str, ...]:
    """Names of tunable kernels; a word stands for all that begin with it, and none for all of which the table has any shape."""
    found: dict[str, None] = {}
    for word in words:
        matching = [name for name in TUNABLE if name == word] or [name for name in TUNABLE if name.startswith(word)]
        if not matching:
            raise UsageError(f"no tunable kernel '{word}'{nearest(word, TUNABLE)} (known: {', '.join(TUNABLE)})")
        found |= dict.fromkeys(matching)
    return tuple(found) or tuple(name for name in TUNABLE if block_table().get(name))


def target(name: str) -> Path:
    """The file that --write names; UsageError before anything runs when nothing can be written there."""
    path = Path(str(importlib.resources.files("flashbench.kernels") / TABLE)) if name == PACKAGE else Path(name)
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"--write: cannot write '{path}' ({error.strerror})") from None
    return path


def print_plan(tuned: Sequence[Entry], device: Device, rounds: int, check_only: bool) -> None:
    for entry in tuned:
        print(f"{entry.name}: {', '.join(shape.row() for shape in entry.shapes) or 'no shape fits'}")
        for problem in entry.problems:
            print(f"  {problem.label}")
    checked = sum(len(checks(entry, device.kind)) for entry in tuned)
    timed = 0 if check_only else rounds * sum(len(entry.shapes) * len(entry.problems) for entry in tuned)
    seconds = START_SECONDS + checked * CHECK_SECONDS_EACH / workers() + timed * TIME_SECONDS_EACH
    about = f", about {max(1, round(seconds / 60))} min" if device.kind == "cuda" else ""
    print(f"{checked} checks, {timed} timings{about}", file=sys.stderr)


def execute(
    tuned: Sequence[Entry], device: Device, root: Path, rounds: int, check_only: bool, write: Path | None
) -> int:
    """Try every shape, print and keep what came of it, and return the exit code: 4 when a shape of the table failed."""
    from flashbench.run.lock import device_lock
    from flashbench.run.signals import stop_on_signals

    folder = _folder(root, device)
    settings = {"rule": RULE}
    total = sum(len(checks(entry, device.kind)) for entry in tuned)
    total += 0 if check_only else rounds * sum(len(entry.shapes) * len(entry.problems) for entry in tuned)
    found: list[Found] = []
    with stop_on_signals(), device_lock(device), (folder / "rows.jsonl").open("w", encoding="utf-8") as rows:

        def keep(trials: Iterable[Found]) -> Iterator[Found]:
            for one in trials:
                found.append(one)
                rows.write(json.dumps(_plain(one), allow_nan=False) + "\n")
                rows.flush()
                yield one

        _shown(keep(check_all(tuned, device, settings)), total, len(found))
        if not check_only:
            out = {(one.entry, one.shape) for one in found if one.dropped}
            _shown(keep(time_all(tuned, out, device, settings, rounds)), total, len(found))
    for entry in tuned:
        _print_table(entry, [one for one in found if one.entry == entry])
    if not check_only:
        for path in [folder / TABLE, *([write] if write else [])]:
            _write(path, tuned, found, device)
            print(path, file=sys.stderr)
    print(f"{len(found)} trials in {folder / 'rows.jsonl'}", file=sys.stderr)
    failed = any(one.answer["status"] in FAILED_STATUSES and one.shape in one.entry.known for one in found)
    out = {(one.entry, one.shape) for one in found if one.dropped}
    useless = [entry for entry in tuned if all((entry, shape) in out for shape in entry.shapes)]
    for entry in useless:
        print(f"{entry.name}: no shape can be used here", file=sys.stderr)
    return 4 if failed or useless else 0


def _folder(root: Path, device: Device) -> Path:
    """A new folder of results with what the trials were run on."""
    from flashbench import __version__
    from flashbench.hardware.catalogue import device_id

    now = datetime.now(UTC)
    folder = root / device_id(device) / f"{now:%Y%m%dT%H%M%SZ}-tune"
    header = {
        "command": shlex.join(["flashbench", *sys.argv[1:]]),
        "started": now.isoformat(timespec="seconds"),
        "flashbench": __version__,
        "device": to_plain(device),
        "rule": RULE,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tune.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write results below '{root}' ({error.strerror}); name another folder with --out"
        ) from None
    return folder


def _plain(one: Found) -> dict[str, object]:
    entry = one.entry
    place = {"kernel": entry.kernel, "family": entry.family, "kind": entry.kind, "width": entry.width}
    answer = {name: value for name, value in one.answer.items() if name != "type" and value is not None}
    step = "check" if one.round is None else "time"
    rounds = {} if one.round is None else {"round": one.round}
    return {"step": step, **place, "shape": one.shape.row(), "problem": one.problem.label, **rounds, **answer}


def _shown(trials: Iterator[Found], total: int, done: int) -> None:
    """Draw the trials to their end: a bar where stderr is a terminal, and a line for each shape that is out."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, markup=False)
    told: set[tuple[Entry, BlockShape]] = set()
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total, completed=done)
        for one in trials:
            step = "checked" if one.round is None else f"round {one.round + 1}"
            bar.update(task, advance=1, description=f"{step}: {one.shape.row()} on {one.problem.label}")
            worth_saying = one.shape in one.entry.known or one.answer["status"] in FAILED_STATUSES
            if one.dropped and worth_saying and (one.entry, one.shape) not in told:
                told.add((one.entry, one.shape))
                console.print(f"{one.entry.name}: {one.shape.row()} {one.dropped}", soft_wrap=True)


def times_of(found: Iterable[Found]) -> dict[BlockShape, dict[Problem, list[float]]]:
    """The times of every shape on every problem, one a round."""
    times_ms: dict[BlockShape, dict[Problem, list[float]]] = {}
    for one in found:
        if one.round is not None and one.answer["status"] == "ok":
            times_ms.setdefault(one.shape, {}).setdefault(one.problem, []).append(one.answer["median_ms"])
    return times_ms


def order(entry: Entry, found: Sequence[Found]) -> list[BlockShape]:
    """The list as the table is to have it: by rank, then what the table had and could not be timed here; nothing that failed."""
    failed = {one.shape for one in found if one.answer["status"] in FAILED_STATUSES}
    ranked = [shape for shape, _ in rank(times_of(found)) if shape not in failed]
    best = [shape for place, shape in enumerate(ranked) if place < KEPT or shape in entry.known]
    return best + [shape for shape in entry.known if shape not in best and shape not in failed]


def _write(path: Path, tuned: Sequence[Entry], found: Sequence[Found], device: Device) -> None:
    """The table with the lists of `tuned` in their new order: of the file where it has one, else the package's."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = text or table_text()
    for entry in tuned:
        own = [one for one in found if one.entry == entry]
        if not times_of(own):
            continue
        shapes = order(entry, own)
        note = _note(entry, device)
        text = rewritten(text, (entry.kernel, entry.family, entry.kind, entry.width), shapes, note)
        if list(read_table(text)[entry.kernel][entry.family][entry.kind][entry.width]) != shapes:
            raise FlashbenchError(f"'{path}' was not written: its list of {entry.name} could not be replaced")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write '{path}' ({error.strerror}); the timings are kept") from None


def _note(entry: Entry, device: Device) -> str:
    def told(values: Iterable[object]) -> str:
        return ", ".join(map(str, dict.fromkeys(values)))

    problems = entry.problems
    triton = device.versions.get("triton", "unknown")
    return (
        f"measured {datetime.now(UTC):%Y-%m-%d} on {device.name}, Triton {triton}: {told(p.dtype for p in problems)}; "
        f"seq {told(p.seq_kv for p in problems)}; {told(p.mask for p in problems)}"
    )


def _print_table(entry: Entry, found: Sequence[Found]) -> None:
    from rich.console import Console
    from rich.table import Table

    times_ms, problems = times_of(found), entry.problems
    timed = (
        ["of best", *(f"{label} ms" for label in distinct([problem.label for problem in problems]))] if times_ms else []
    )
    table = Table(box=None, pad_edge=False, header_style="bold", title=entry.name, title_justify="left")
    table.add_column("shape", no_wrap=True)
    for title in (*timed, "error", "registers", "spills", "shared KiB", "in table"):
        table.add_column(title, justify="right")
    ratios: Mapping[BlockShape, float] = dict(rank(times_ms))
    for shape in sorted(entry.shapes, key=lambda shape: ratios.get(shape, float("inf"))):
        own = [one for one in found if one.shape == shape]
        figures: dict[str, Any] = next((one.answer["figures"] for one in own if "figures" in one.answer), {})
        errors = [one.answer["error_norm"] for one in own if one.answer.get("error_norm") is not None]
        shared = figures.get("shared_bytes")
        typical = [median(times_ms.get(shape, {}).get(problem, [])) for problem in problems]
        place = f"{ratios[shape]:.3f}" if shape in ratios else "dropped"
        table.add_row(
            shape.row(),
            *((place, *("-" if value is None else f"{value:.4g}" for value in typical)) if times_ms else ()),
            f"{max(errors):.1e}" if errors else "-",
            str(figures.get("registers", "-")),
            str(figures.get("spills", "-")),
            "-" if shared is None else f"{shared / 1024:.0f}",
            str(entry.known.index(shape) + 1) if shape in entry.known else "new",
        )
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def distinct(labels: Sequence[str]) -> list[str]:
    """Each label without the words that all of them have; dense problems, whose mask is not written, are called so."""
    common = set.intersection(*(set(label.split()) for label in labels)) if len(labels) > 1 else set()
    return [" ".join(word for word in label.split() if word not in common) or "dense" for label in labels]
