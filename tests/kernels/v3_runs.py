"""What the GPU tests of flash-v3 run, in this process."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest
import torch
from problems import LARGE, SMALL, AttentionProblem, Errors, errors, inputs

HALF = ("bf16", "fp16")


def needs_gluon() -> None:
    """Skips a module where Triton is older than flash-v3 needs; imports none of it."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found = "0.0"
    if tuple(map(int, found.split(".")[:2])) < (3, 6):
        pytest.skip(f"needs Triton 3.6, for Gluon; this is {found}", allow_module_level=True)


def problems() -> list[AttentionProblem]:
    """The table, in half precision: what it asks in fp32 or tf32 is asked in fp16, and each problem once."""
    halved = [case if case.problem.dtype in HALF else case.but(dtype="fp16") for case in (*SMALL, *LARGE)]
    return list({dataclasses.replace(case, name=""): case for case in halved}.values())


def options_of(case: AttentionProblem) -> dict[str, Any]:
    return {"mask": case.problem.mask, "scale": case.scale}


def forward_errors(case: AttentionProblem, seed: int = 0, **choice: Any) -> Errors:
    """Errors of the kernel, or of a variant or design of it, on a problem against float64."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    q, k, v = inputs(case, "cuda", seed)
    out, lse = flash_v3_forward(q, k, v, with_lse=True, **options_of(case), **choice)
    return errors(case, q, k, v, out, lse)


def reason_against(case: AttentionProblem) -> str | None:
    """Why the kernel takes a problem's tensors not, in its own words."""
    from flashbench.errors import UsageError
    from flashbench.kernels.flash_v3_launches import prepare

    try:
        prepare(*inputs(case, "cuda"), **options_of(case))
    except UsageError as error:
        return str(error)
    return None


def elements_written_beyond_the_end(case: AttentionProblem, **choice: Any) -> int:
    """How many elements the kernel wrote behind its output and LSE, which here are the start of larger buffers."""
    from flashbench.kernels import flash_v3_launches as v3

    untouched = -7.0
    q, k, v = inputs(case, "cuda")
    launch = v3.prepare(q, k, v, with_lse=True, **options_of(case), **choice)
    out = torch.full((launch.out.numel() + 4096,), untouched, dtype=launch.out.dtype, device="cuda")
    lse = torch.full((launch.lse.numel() + 4096,), untouched, device="cuda")
    arguments = list(launch.arguments)
    # The fourth descriptor is that of the output, and the LSE's pointer follows it.
    old = arguments[3]
    arguments[3] = v3.describe(out[: launch.out.numel()].view(launch.out.shape), *old.block_shape[2:])
    arguments[4] = lse
    v3.run(launch._replace(arguments=tuple(arguments)))
    return sum(int((buffer[-4096:] != untouched).sum()) for buffer in (out, lse))
