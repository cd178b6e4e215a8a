"""Designs of our kernels against each other and their peers, in turns in one process: `python tests/gpu/compare_designs.py flash-v3 flash-v3@carry=False`.

For whoever tunes the kernel: half a minute for a dozen designs, where `flashbench sweep` measures variants with care. A name is that of a
provider (sdpa-cudnn, fa3, flash-v2, flash-v3:VARIANT), with fields of flash_v3_designs.Design behind an @ if it is flash-v3's, a block shape if
it is flash-v2's: `flash-v3@consumers=2+pingpong=True`, `flash-v2@64x64+w4+s3+tma`. Each is compiled in a process of its own first, and its
output compared with the first name's. The L2 is overwritten before each launch, and a spin hides the host's work; without pauses (--idle) the
card runs at its power limit, so that only ratios of one run count.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

Attention = Callable[..., Any]
TOKENS, HIDDEN = 16384, 2048
L2_BYTES = 256 << 20
SPIN_CYCLES = 1_500_000
"""0.8 ms: what the host needs for two launches beside other processes."""
ALIKE = {"bf16": 8e-3, "fp8": 5e-2}
"""Two right outputs differ by less, normwise."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=["flash-v3", "fa3"])
    parser.add_argument("--against", default="sdpa-cudnn", help="the provider that ratios refer to")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="512,1024,4096,16384")
    parser.add_argument("--masks", default="none,causal")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp8"), default="bf16", help="fp8: against fa3, V transposed in every call"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--idle", type=float, default=0.0, help="pause after each launch, in lengths of it")
    parser.add_argument("--processes", type=int, default=12)
    return parser.parse_args()


def shape(length: int, head_dim: int) -> tuple[int, int, int, int]:
    return TOKENS // length, HIDDEN // head_dim, length, head_dim


def attention(name: str, length: int, head_dim: int, mask: str, dtype: str) -> Attention:
    """The callable of a provider, or of a design of flash-v3, for a shape."""
    provider, _, fields = name.partition("@")
    if fields and provider == "flash-v2":
        from flashbench.kernels.blocks import parse_shape
        from flashbench.kernels.flash_v2 import flash_v2_forward

        return partial(flash_v2_forward, mask=mask, blocks=parse_shape(fields.replace("+", " ")))
    if fields:
        from flashbench.kernels import flash_v3_fp8
        from flashbench.kernels.flash_v3_designs import design_for
        from flashbench.kernels.flash_v3_launches import flash_v3_forward

        variant = provider.partition(":")[2]
        changes = {field: ast.literal_eval(value) for field, value in (each.split("=") for each in fields.split("+"))}
        if dtype == "fp8":
            design = replace(flash_v3_fp8.DESIGNS[head_dim], **changes)
            return partial(flash_v3_fp8.flash_v3_fp8_forward, mask=mask, design=design)
        design = replace(
            design_for(head_dim, head_dim, variant, seq_q=length, seq_kv=length, causal=mask != "none"), **changes
        )
        return partial(flash_v3_forward, mask=mask, design=design)
    from flashbench.measure.device import describe
    from flashbench.providers.table import get
    from flashbench.records import Problem

    batch, heads, seq, dim = shape(length, head_dim)
    problem = Problem(batch, heads, heads, seq, seq, dim, dim, dtype, mask=mask)
    bound: Attention = get(provider).bind(problem, describe("cuda")).call
    return bound


def tensors(length: int, head_dim: int, dtype: str) -> list[Any]:
    import torch

    from flashbench.kernels.quantization import quantized

    qkv = [torch.randn(shape(length, head_dim), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [*quantized(*qkv)] if dtype == "fp8" else qkv


def compiled(case: tuple[str, int, int, str, str]) -> str | None:
    """What is wrong with a case, in words, or None: run once in a process of its own, where it fills Triton's cache."""
    import torch

    _, length, head_dim, _, dtype = case
    try:
        attention(*case)(*tensors(length, head_dim, dtype))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def median_ms(calls: dict[str, Attention], qkv: list[Any], rounds: int, idle: float) -> dict[str, float]:
    """Median time of each, all taken in turns in an order of chance."""
    import torch

    flush = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            calls[name](*qkv)
            end.record()
            events[name].append((start, end))
            if idle:
                end.synchronize()
                time.sleep(idle * start.elapsed_time(end) / 1e3)
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def main() -> None:
    asked = arguments()
    against = "fa3" if asked.dtype == "fp8" else asked.against
    names = list(dict.fromkeys([against, *asked.names]))
    head_dims, lengths = (list(map(int, text.split(","))) for text in (asked.head_dims, asked.lengths))
    cases = [
        (name, length, head_dim, mask, asked.dtype)
        for head_dim, length, mask, name in itertools.product(head_dims, lengths, asked.masks.split(","), names)
    ]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        faults = dict(zip(cases, pool.map(compiled, cases, chunksize=1), strict=True))
    logs: dict[str, list[float]] = {name: [] for name in names}
    for head_dim, length, mask in itertools.product(head_dims, lengths, asked.masks.split(",")):
        qkv = tensors(length, head_dim, asked.dtype)
        fault = {name: faults[name, length, head_dim, mask, asked.dtype] for name in names}
        calls = {name: attention(name, length, head_dim, mask, asked.dtype) for name in names if fault[name] is None}
        outputs = {name: call(*qkv).float() for name, call in calls.items()}
        times = median_ms(calls, qkv, asked.rounds, asked.idle)
        pairs = length * (length + 1) / 2 if mask == "causal" else length**2
        flops = 4 * TOKENS // length * HIDDEN * pairs
        words = []
        for name in names:
            if name not in times:
                words.append(f"{name} failed ({fault[name]})")
                continue
            ratio = times[against] / times[name]
            logs[name].append(math.log(ratio))
            expected = outputs[against]
            error = ((outputs[name] - expected).norm() / expected.norm()).item()
            wrong = f" WRONG by {error:.1e}" if not error < ALIKE[asked.dtype] else ""
            words.append(f"{name} {flops / times[name] / 1e9:.0f} ({ratio:.3f}){wrong}")
        print(f"d {head_dim} {length} {mask}:  {'  '.join(words)}", flush=True)
    for name, found in logs.items():
        if found:
            print(f"{name}: {math.exp(statistics.mean(found)):.4f} x {against}, {len(found)} cases")


if __name__ == "__main__":
    main()
