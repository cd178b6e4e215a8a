"""Compile the forward kernel for a GPU that is not there, exactly as a call would: `python compile_child.py 90 < cases`.

Reads pickled problems from standard input, writes JSON lines to standard output. A process of its own, since Triton ends it (exit
code 134) on an instruction that the target lacks.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from forward_runs import options_of
from problems import TORCH_DTYPES, AttentionProblem

from flashbench.kernels.inputs import DeviceLimits

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Most shared memory that one program may take: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def meta_tensor(batch: int, heads: int, seq: int, dim: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory, 16-byte aligned, in one of three layouts that compile differently."""
    if layout == "channels-first":
        return torch.empty(batch, heads, dim, seq, dtype=dtype, device="meta").transpose(2, 3)
    if layout == "sliced":
        return torch.empty(batch, heads, seq, dim + 1, dtype=dtype, device="meta")[..., :dim]
    return torch.empty(batch, heads, seq, dim, dtype=dtype, device="meta")


def compile_case(case: AttentionProblem, architecture: int) -> dict[str, Any]:
    """What the compiler and the assembler say of the kernel for one problem."""
    from triton.backends.nvidia.compiler import get_ptxas

    from flashbench.kernels import flash_v2
    from flashbench.kernels.blocks import shared_bytes

    p = case.problem
    flash_v2.device_limits = lambda _: DeviceLimits(divmod(architecture, 10), SHARED_BYTES[architecture], 40 * 2**20)
    shapes = (
        (p.heads_q, p.seq_q, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim_v),
    )
    dtype = TORCH_DTYPES[p.dtype]
    q, k, v = (meta_tensor(p.batch, *shape, layout, dtype) for shape, layout in zip(shapes, case.layouts, strict=True))
    launch = flash_v2.prepare(q, k, v, with_lse=True, **options_of(case))
    compiled = flash_v2.flash_v2_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)

    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers
    assert spilled
    sass = compiled.asm["sass"]
    return {
        "name": case.name,
        "blocks": str(launch.blocks),
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        "shared_bytes": compiled.metadata.shared,
        "shared_estimate_bytes": shared_bytes(
            launch.blocks, divmod(architecture, 10), p.dtype, p.head_dim, p.head_dim_v
        ),
        "shared_limit_bytes": SHARED_BYTES[architecture],
        "instructions": {
            name: len(re.findall(rf"\b{name}\b", sass)) for name in ("HMMA", "HGMMA", "UTCHMMA", "UTMALDG", "LDGSTS")
        },
    }


def main() -> None:
    from triton.runtime import driver

    architecture = int(sys.argv[1])
    driver.set_active(AbsentGpu(architecture))
    for case in pickle.load(sys.stdin.buffer):
        print(json.dumps(compile_case(case, architecture)), flush=True)


if __name__ == "__main__":
    main()
