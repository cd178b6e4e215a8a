"""Is the output right? Every tensor of a case against the reference, before any time is shown.

A tensor passes when both its normwise error and its largest error are within a small multiple of what plain attention makes in
the same dtype, plus one rounding of the output, and of the sum in fp32 that it is: over many keys values cancel, and what is left is
small beside the rounding of its terms. The normwise tolerance is capped per dtype, so that naive attention is checked too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.measure.reference import Reference, error_max, error_norm
from flashbench.measure.workload import output_dtype
from flashbench.records import Check, Problem

NORM_MULTIPLE = 2.0
MAX_MULTIPLE = 3.0
NORM_FLOOR = {"bf16": 1e-3, "fp16": 2e-4, "fp32": 2e-6, "tf32": 2e-4, "fp8": 1e-3}
"""Half a unit in the last place of the output (of fp8: bf16); for fp32 the 2 ulp of the GPU's exp2 as well (CUDA C++ guide, table of ex2.approx)."""
NORM_CAP = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "tf32": 5e-3, "fp8": 2.0**-4}
"""Beyond this no result is right, whatever plain attention does. In fp8 the largest rounding of a weight, whose
mantissa has 3 bits; roundings are 2.6 % in root mean square (2^-4 / sqrt(3), over mantissas from 1 to 2), each by itself, and so is their sum
over keys whose values are as often negative as not, whatever the number of keys."""
SUM_ROUNDING = 2.0**-24
"""Of an fp32 sum, as a share of its terms: by as much in the mean, by four times at the most."""
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp8": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """`problem` says in words what is wrong, or is None; `check` holds the figures where there are any."""

    check: Check | None
    problem: str | None
    warnings: tuple[str, ...] = ()


def check_results(
    problem: Problem, reference: Reference, results: dict[str, Tensor], again: dict[str, Tensor] | None = None
) -> Outcome:
    """Compare all results of a case with the reference, and two calls with one another."""
    worst: Check | None = None
    worst_share = -1.0
    complaint: str | None = None
    run_to_run = _run_to_run(results, again)
    for name, true in reference.true.items():
        value = results[name]
        if tuple(value.shape) != tuple(true.shape):
            return Outcome(None, f"{name} has shape {tuple(value.shape)}, not {tuple(true.shape)}")
        expected = output_dtype(problem)
        if value.dtype != expected:
            return Outcome(None, f"{name} has dtype {_short(value.dtype)}, not {_short(expected)}")
        wrong = int((~torch.isfinite(value)).sum())
        if wrong:
            truly = int((~torch.isfinite(true)).sum())
            complaint = (
                complaint or f"{name} has {wrong} non-finite values of {value.numel()}, the reference has {truly}"
            )
            continue
        check = _figures(problem, reference, name, value, run_to_run)
        share = max(check.error_norm / check.tolerance_norm, check.error_max / check.tolerance_max)
        if share > worst_share:
            worst, worst_share = check, share
    if complaint is None and worst is not None and worst_share > 1:
        complaint = (
            f"{worst.worst} is wrong: normwise error {worst.error_norm:.2e} (allowed {worst.tolerance_norm:.2e}), "
            f"largest error {worst.error_max:.2e} (allowed {worst.tolerance_max:.2e})"
        )
    warnings = (f"output differs from call to call by up to {run_to_run:.2e}",) if run_to_run else ()
    return Outcome(worst, complaint, warnings)


def _figures(problem: Problem, reference: Reference, name: str, value: Tensor, run_to_run: float | None) -> Check:
    true = reference.true[name]
    naive_norm, naive_max = reference.naive_error_norm[name], reference.naive_error_max[name]
    largest = float(true.abs().max())
    dtype = problem.dtype
    of_the_sum = SUM_ROUNDING * reference.mean_value if name == "out" else 0.0
    typical = float(true.double().square().mean().sqrt()) or 1.0
    return Check(
        worst=name,
        error_norm=error_norm(value, true),
        error_max=error_max(value, true),
        tolerance_norm=min(NORM_MULTIPLE * naive_norm + NORM_FLOOR[dtype] + of_the_sum / typical, NORM_CAP[dtype]),
        tolerance_max=MAX_MULTIPLE * naive_max + max(EPSILON[dtype] * largest, 1e-30) + 4 * of_the_sum,
        naive_error_norm=naive_norm,
        naive_error_max=naive_max,
        reference_dtype=reference.dtype,
        run_to_run_max=run_to_run,
    )


def _run_to_run(first: dict[str, Tensor], second: dict[str, Tensor] | None) -> float | None:
    if second is None or any(first[n].shape != second[n].shape for n in first):
        return None
    # NaN differs from itself; that is the non-finite check's business.
    return max(float((first[n].float() - second[n].float()).abs().nan_to_num(0.0).max()) for n in first)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
