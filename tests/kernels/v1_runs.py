"""What the tests of flash-v1 run in a process of its own: in the interpreter, on a GPU, or compiled for a GPU that is not there.

python v1_runs.py 90 < cases      compiles as compile_child.py does for flash-v2: pickled problems in, JSON lines out
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import numpy as np
import torch
from compile_child import AbsentGpu, figures, limits_of, meta_inputs
from forward_runs import options_of
from problems import AttentionProblem, Errors, errors, inputs

from flashbench.kernels.blocks import BlockShape


def v1_errors(
    case: AttentionProblem, blocks: BlockShape | None = None, device: str = "cpu", with_lse: bool = True
) -> Errors:
    """Errors of the kernel on a problem against float64."""
    from flashbench.kernels.flash_v1 import flash_v1_forward

    q, k, v = inputs(case, device)
    result = flash_v1_forward(q, k, v, with_lse=with_lse, blocks=blocks, **options_of(case))
    out, lse = result if with_lse else (result, None)
    return errors(case, q, k, v, out, lse)


def v1_values(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE for given fp32 values, (batch, heads, seq, channel) each."""
    from flashbench.kernels.flash_v1 import flash_v1_forward

    out, lse = flash_v1_forward(*map(torch.from_numpy, (q, k, v)), with_lse=True, **options)
    return out.numpy(), lse.numpy()


def difference_between_loop_orders(case: AttentionProblem, blocks: BlockShape | None, device: str = "cpu") -> float:
    """max |flash-v1 - flash-v2| / max |v| on the same inputs in the same tiles."""
    from flashbench.kernels.flash_v1 import flash_v1_forward
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(case, device)
    v1, v2 = (call(q, k, v, blocks=blocks, **options_of(case)) for call in (flash_v1_forward, flash_v2_forward))
    return ((v1.double() - v2.double()).abs().max() / v.double().abs().max()).item()


def elements_written_astray(case: AttentionProblem, blocks: BlockShape | None = None, device: str = "cpu") -> int:
    """Elements written behind the output, the LSE or what waits between key blocks, each here the start of a larger buffer; and elements
    of the last that held NaN before and reached the output.
    """
    from flashbench.kernels import flash_v1

    q, k, v = inputs(case, device)
    launch = flash_v1.prepare(q, k, v, with_lse=True, blocks=blocks, **options_of(case))
    written = launch.arguments[3:8]
    spare, untouched = 4096, -7.0
    buffers = {}
    for tensor in written:
        buffer = torch.full((tensor.numel() + spare,), float("nan"), dtype=tensor.dtype, device=device)
        buffer[-spare:] = untouched
        buffers[id(tensor)] = buffer
    arguments = tuple(buffers.get(id(argument), argument) for argument in launch.arguments)
    flash_v1.run(launch._replace(arguments=arguments))
    out = buffers[id(launch.out)][: launch.out.numel()]
    return sum(int((buffer[-spare:] != untouched).sum()) for buffer in buffers.values()) + int(out.isnan().sum())


def bytes_asked_for(case: AttentionProblem, blocks: BlockShape) -> int:
    """Bytes of all elements that the kernel loads and stores, without those that a mask leaves out: as if nothing were cached."""
    from triton.runtime.interpreter import InterpreterBuilder

    from flashbench.kernels.flash_v1 import flash_v1_forward

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    moved = 0

    def count(pointers: Any, mask: Any) -> None:
        nonlocal moved
        moved += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counting_load, counting_store
    try:
        flash_v1_forward(*inputs(case), with_lse=True, blocks=blocks, **options_of(case))
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    return moved


def compile_case(case: AttentionProblem, architecture: int) -> dict[str, Any]:
    """What the compiler and the assembler say of the kernel for one problem."""
    from flashbench.kernels import flash_v1

    flash_v1.device_limits = lambda _: limits_of(architecture)
    launch = flash_v1.prepare(*meta_inputs(case), with_lse=True, **options_of(case))
    compiled = flash_v1.flash_v1_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    return figures(case, "flash-v1", compiled, launch.blocks, flash_v1.shared_bytes, architecture)


def main() -> None:
    from triton.runtime import driver

    architecture = int(sys.argv[1])
    driver.set_active(AbsentGpu(architecture))
    for case in pickle.load(sys.stdin.buffer):
        print(json.dumps(compile_case(case, architecture)), flush=True)


if __name__ == "__main__":
    main()
