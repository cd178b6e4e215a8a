"""Compile kernels for a GPU that is not there, exactly as a call would: `python compile_child.py 90 forward < cases`.

The kernels are those of the forward pass, of decoding (decode) or of a variant of the backward pass (two-pass, one-pass), all of it
in turn. Reads pickled problems from standard input, writes JSON lines to standard output. A process of its own, since Triton ends it
(exit code 134) on an instruction that the target lacks.
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
SMS = 132
"""Multiprocessors of the absent GPU, of which the number of splits depends."""


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


def meta_inputs(case: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = case.problem
    shapes = (
        (p.heads_q, p.seq_q, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim_v),
    )
    dtype = TORCH_DTYPES[p.dtype]
    q, k, v = (meta_tensor(p.batch, *shape, layout, dtype) for shape, layout in zip(shapes, case.layouts, strict=True))
    return q, k, v


def compile_forward(case: AttentionProblem, architecture: int) -> list[dict[str, Any]]:
    """What the compiler and the assembler say of the forward kernel for one problem."""
    from flashbench.kernels import flash_v2
    from flashbench.kernels.blocks import shared_bytes

    flash_v2.device_limits = lambda _: limits_of(architecture)
    launch = flash_v2.prepare(*meta_inputs(case), with_lse=True, **options_of(case))
    compiled = flash_v2.flash_v2_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    return [figures(case, "", compiled, launch.blocks, shared_bytes, architecture)]


def compile_backward(
    case: AttentionProblem, architecture: int, variant: str, blocks: tuple[Any, ...] | None = None
) -> list[dict[str, Any]]:
    """The same of a backward pass: its kernels, that of the row statistics left out."""
    from flashbench.kernels import flash_v2_gradients as gradients

    p = case.problem
    gradients.device_limits = lambda _: limits_of(architecture)
    q, k, v = meta_inputs(case)
    out, d_out = (
        torch.empty(p.batch, p.heads_q, p.seq_q, p.head_dim_v, dtype=q.dtype, device="meta") for _ in range(2)
    )
    lse = torch.empty(out.shape[:3], device="meta")
    backward = gradients.prepare(q, k, v, out, lse, d_out, variant=variant, blocks=blocks, **options_of(case))
    found = []
    for kernel, launch, shape in zip(gradients.KERNELS[variant], backward.passes, backward.blocks, strict=True):
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
        found.append(figures(case, kernel, compiled, shape, gradients.SHARED_BYTES[kernel], architecture))
    launch = backward.statistics
    launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    return found


def compile_decode(case: AttentionProblem, architecture: int) -> list[dict[str, Any]]:
    """The same of decoding: the kernel over the splits, with pages where the problem has a page size, and the one that adds up its parts."""
    from flashbench.kernels import flash_decode
    from flashbench.kernels.splits import decode_shared_bytes

    p = case.problem
    flash_decode.device_limits = lambda _: limits_of(architecture)
    flash_decode.sm_count = lambda _: SMS
    q, k, v = meta_inputs(case)
    cache: tuple[torch.Tensor, ...] = (k, v)
    if p.page_size is not None:
        width = -(-p.seq_kv // p.page_size)
        shape = (p.batch * width, p.heads_kv, p.page_size)
        pages = (torch.empty(*shape, dim, dtype=q.dtype, device="meta") for dim in (p.head_dim, p.head_dim_v))
        index = ((p.batch, width), (p.batch,))
        cache = (*pages, *(torch.empty(size, dtype=torch.int32, device="meta") for size in index))
    launch = flash_decode.prepare(q, *cache, with_lse=True, **options_of(case))
    compiled = flash_decode.flash_decode_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    found = [figures(case, "splits", compiled, launch.blocks, decode_shared_bytes, architecture)]
    if launch.combine is not None:
        kernel = flash_decode.combine_kernel
        compiled = kernel.warmup(*launch.combine.arguments, grid=launch.combine.grid, **launch.combine.constants)
        found.append(figures(case, "combine", compiled, launch.blocks, decode_shared_bytes, architecture))
    return found


def limits_of(architecture: int) -> DeviceLimits:
    return DeviceLimits(divmod(architecture, 10), SHARED_BYTES[architecture], 40 * 2**20)


def figures(
    case: AttentionProblem, kernel: str, compiled: Any, blocks: Any, need: Any, architecture: int
) -> dict[str, Any]:
    """Registers and spills from the assembler, shared memory from Triton, instructions from the disassembler."""
    from triton.backends.nvidia.compiler import get_ptxas

    p = case.problem
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
        "kernel": kernel,
        "blocks": str(blocks),
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        "serialised": "wgmma.mma_async instructions are serialized" in log,
        "shared_bytes": compiled.metadata.shared,
        "shared_estimate_bytes": need(blocks, divmod(architecture, 10), p.dtype, p.head_dim, p.head_dim_v),
        "shared_limit_bytes": SHARED_BYTES[architecture],
        "instructions": {
            name: len(re.findall(rf"\b{name}\b", sass))
            for name in ("HMMA", "HGMMA", "UTCHMMA", "UTMALDG", "UTMAREDG", "LDGSTS")
        },
        "wide_copies": len(re.findall(r"\bLDGSTS\.\S*\b128\b", sass)),
        "waits_before_it_reads": "ACQBULK" in sass and not re.search(r"\bLDG", sass.partition("ACQBULK")[0]),
    }


def main() -> None:
    from triton.runtime import driver

    architecture, what = int(sys.argv[1]), sys.argv[2]
    driver.set_active(AbsentGpu(architecture))
    for case in pickle.load(sys.stdin.buffer):
        if what == "forward":
            found = compile_forward(case, architecture)
        elif what == "decode":
            found = compile_decode(case, architecture)
        else:
            found = compile_backward(case, architecture, what)
        for line in found:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
