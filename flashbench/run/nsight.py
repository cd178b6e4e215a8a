"""Nsight Compute as a command: what is asked of it, what it answers, and what its refusals mean.

`ncu` prints its counters as CSV itself, and that is read here. NVIDIA's `nsight-python` was weighed and left: it drives kernel and
range replay of decorated functions, not replay of the whole application, without which a pass would find in the L2 what
restoring memory left there; and its reader, `ncu-report`, must be as new as the `ncu` installed.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flashbench.errors import FlashbenchError

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "time_ns": "gpu__time_duration.sum",
}
"""Our names of the counters that every case is asked for."""
TENSOR = re.compile(r"sm__inst_executed_pipe_tensor(_op_[hg]mma)?")
"""The tensor pipe's instructions: one counter, or on Hopper one for mma and one for wgmma."""
QUERY_SECONDS = 120

UNITS = {
    "": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "inst": 1.0, "Kinst": 1e3, "Minst": 1e6, "Ginst": 1e9,
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
"""Bytes, instructions and nanoseconds to one of each unit that ncu prints."""


class CountersUnavailable(FlashbenchError):
    """No counter can be read here, whatever the case; the message says what to install or to allow."""

    exit_code = 3


REFUSALS = {
    "ERR_NVGPUCTRPERM": (
        "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root or with CAP_SYS_ADMIN, "
        "or let an administrator load the nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "InsufficientPrivileges": (
        "this user may not read the GPU's performance counters: run as root or with CAP_SYS_ADMIN, "
        "or let an administrator load the nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "LibraryNotLoaded": (
        "Nsight Compute cannot load the driver's profiling library here, as in a sandbox that does not pass it on: "
        "run outside of the sandbox, or install the driver's full package"
    ),
    "ResourceUnavailable": "another tool holds the GPU's performance counters (DCGM, a second profiler): stop it, and try again",
    "driver resource was unavailable": (
        "another tool holds the GPU's performance counters (DCGM, a second profiler): stop it, and try again"
    ),
}
"""Words in ncu's output that mean that no case can be counted, and what to do about each."""


def find_ncu() -> str:
    """The path of `ncu`; CountersUnavailable when it is not on PATH."""
    found = shutil.which("ncu")
    if found is None:
        raise CountersUnavailable(
            "counters need Nsight Compute, and `ncu` is not on PATH: install NVIDIA's nsight-compute package (it comes with the "
            "CUDA toolkit), or add its folder to PATH"
        )
    return found


def version(ncu: str) -> str | None:
    """What `ncu --version` says of itself, such as `2025.3.1.0 (build 36398880)`."""
    done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    found = re.search(r"^Version (.+)$", done.stdout, re.MULTILINE)
    return found[1] if found else None


def tensor_metrics(ncu: str) -> tuple[str, ...]:
    """The counters of tensor instructions that this GPU has; none when ncu does not list any."""
    try:
        done = subprocess.run(
            [ncu, "--query-metrics"], capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ()
    return tensor_names(done.stdout)


def tensor_names(listing: str) -> tuple[str, ...]:
    """The tensor counters in the listing of `ncu --query-metrics`: the whole pipe's where there is one, else its parts."""
    names = dict.fromkeys(
        word for line in listing.splitlines() if (word := line.partition(" ")[0]) and TENSOR.fullmatch(word)
    )
    whole = "sm__inst_executed_pipe_tensor"
    return (f"{whole}.sum",) if whole in names else tuple(f"{name}.sum" for name in names)


def command(ncu: str, metrics: Sequence[str], log: Path, program: Sequence[str]) -> list[str]:
    """ncu over a program that marks one range with cudaProfilerStart and Stop, which becomes one result.

    The clocks are left alone, nothing is flushed between the kernels of the range, and each pass runs the whole program again,
    so that it finds memory and caches as the first one did.
    """
    return [
        ncu,
        *("--replay-mode", "app-range", "--clock-control", "none", "--cache-control", "none"),
        *("--target-processes", "application-only", "--metrics", ",".join(metrics)),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *program,
    ]


def refusal(output: str) -> CountersUnavailable | None:
    """The error that ncu's output amounts to when it concerns the machine and not the case."""
    return next((CountersUnavailable(text) for word, text in REFUSALS.items() if word in output), None)


def complaint(output: str) -> str | None:
    """ncu's own error, or its warning that nothing was profiled, as one line; None when it has none."""
    for mark in ("==ERROR==", "==WARNING=="):
        lines = [line.removeprefix(mark).strip() for line in output.splitlines() if line.startswith(mark)]
        if lines:
            return lines[0]
    return None


def read_csv(output: str) -> list[dict[str, float | None]]:
    """Every result in the raw page that `ncu --csv` prints: metric name to bytes, instructions or nanoseconds.

    A value that ncu could not have ('n/a') is None. FlashbenchError when there is no table, or a unit that is not known.
    """
    lines = [line for line in output.splitlines() if line and not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None or len(lines) < start + 2:
        raise FlashbenchError("Nsight Compute printed no table of counters")
    header, units, *rows = csv.reader(lines[start:])
    places = {name: i for i, name in enumerate(header) if name in METRICS.values() or TENSOR.match(name)}
    return [
        {name: _number(row[i], units[i], name) for name, i in places.items()} for row in rows if len(row) == len(header)
    ]


def _number(text: str, unit: str, name: str) -> float | None:
    if unit not in UNITS:
        raise FlashbenchError(f"Nsight Compute printed {name} in '{unit}', a unit that is not known here")
    try:
        return float(text.replace(",", "")) * UNITS[unit]
    except ValueError:  # 'n/a', or nothing
        return None
