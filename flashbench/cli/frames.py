"""From runs on disk to the frame that tables and plots are drawn from; shared by the commands that read results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.errors import StoreError
from flashbench.hardware import catalogue, ceilings
from flashbench.hardware.ceilings import Ceiling
from flashbench.model.schedule import Schedule
from flashbench.providers.table import PROVIDERS
from flashbench.records import Device, from_plain
from flashbench.store.read import Run, load_run

if TYPE_CHECKING:
    import pandas as pd

    from flashbench.report.roofs import Machine


def derived(paths: Sequence[Path], reference: str | None) -> pd.DataFrame:
    """One row per case of the runs at `paths`, with every metric."""
    import pandas as pd

    return pd.concat([derive_run(load(path), reference) for path in paths], ignore_index=True)


def load(path: Path) -> Run:
    """The run at `path`; what is damaged in it is told on stderr."""
    run = load_run(path)
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    return run


def derive_run(run: Run, reference: str | None) -> pd.DataFrame:
    """One row per case of a run, with every metric."""
    from flashbench.analysis.metrics import derive, summarise
    from flashbench.store.frame import frame

    device = from_plain(Device, run.header["device"])
    spec = catalogue.match(device)
    return derive(
        summarise(frame(run)),
        device,
        spec,
        own_ceilings(run),
        models=models(run.header),
        reference=reference,
    )


def models(header: Mapping[str, Any]) -> Mapping[str, tuple[str, Schedule]]:
    """Algorithm and schedule of each provider: today's table first, so that a corrected model reaches old runs and counters."""
    recorded = {
        name: (model["algorithm"], from_plain(Schedule, model["schedule"]))
        for name, model in header.get("models", {}).items()
    }
    return recorded | {name: (provider.algorithm, provider.schedule) for name, provider in PROVIDERS.items()}


def own_ceilings(run: Run) -> tuple[Ceiling, ...]:
    """The run's own device: data sheet where the catalogue knows it, and what was measured on it."""
    device = from_plain(Device, run.header["device"])
    spec = catalogue.match(device)
    known = ceilings.spec_ceilings(spec) if spec is not None else ()
    try:
        return (*known, *ceilings.load(run.path.parent / "ceilings.json")[1])
    except StoreError:
        return known


def own_machine(run: Run) -> Machine:
    """The run's device as the roofline draws it: its ceilings, and what the footer says of it."""
    from flashbench.report.roofs import Machine

    device = from_plain(Device, run.header["device"])
    facts = [device.name]
    if device.power_limit_w is not None:
        facts.append(f"power limit {device.power_limit_w:.0f} W")
    if device.max_sm_clock_mhz is not None:
        facts.append(f"SM clock up to {device.max_sm_clock_mhz} MHz")
    return Machine(run.device_id, own_ceilings(run), own=True, note=", ".join(facts))
