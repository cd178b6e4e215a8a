"""Compile flash-v3's backward kernel for a Hopper GPU that is not there, exactly as a call would: `python v3_backward_child.py < cases`.

Reads pickled (problem, variant) pairs from standard input, writes JSON lines to standard output. A process of its own, as compile_child.py is.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from typing import Any

import torch
from compile_child import AbsentGpu, limits_of, meta_inputs
from problems import AttentionProblem
from v3_child import assembler_log, machine_code

Instruction = tuple[int, str]


def compiled_case(case: AttentionProblem, variant: str) -> dict[str, Any]:
    """What the compiler and the assembler say of the kernel for one problem."""
    from flashbench.kernels import flash_v3_gradients as gradients
    from flashbench.kernels import flash_v3_launches as v3

    gradients.device_limits = v3.device_limits = lambda _: limits_of(90)
    p = case.problem
    q, k, v = meta_inputs(case)
    out, d_out = (
        torch.empty(p.batch, p.heads_q, p.seq_q, p.head_dim_v, dtype=q.dtype, device="meta") for _ in range(2)
    )
    lse = torch.empty(out.shape[:3], device="meta")
    backward = gradients.prepare(q, k, v, out, lse, d_out, mask=p.mask, scale=case.scale, variant=variant)
    launch = backward.keys
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    ptx = compiled.asm["ptx"]
    log = assembler_log(ptx)
    instructions = parsed(machine_code(compiled.asm["cubin"]))
    width = launch.constants["D"]
    for other in (backward.statistics, backward.queries):
        other.kernel.warmup(*other.arguments, grid=other.grid, **other.constants)
    return {
        "name": case.name,
        "serialised": "wgmma.mma_async instructions are serialized" in log,
        "shared_bytes": compiled.metadata.shared,
        "shared_estimate_bytes": gradients.backward_tile_bytes(backward.design, width),
        "registers_set": sorted({int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}),
        "named_barriers": sorted({int(n) for n in re.findall(r"bar(?:rier)?\.sync\s+(\d+)", ptx)}),
        "scratch_bytes": compiled.metadata.global_scratch_size,
        "reductions": sum("UTMAREDG" in text for _, text in instructions),
        "loops": [described(body) for body in block_loops(instructions)],
    }


def parsed(sass: str) -> list[Instruction]:
    """(address, text) of each instruction."""
    found = (re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line) for line in sass.splitlines())
    return [(int(match[1], 16), match[2]) for match in found if match]


def block_loops(instructions: list[Instruction]) -> list[list[str]]:
    """Bodies of the innermost loops that hold both an exponential and the arrival that ends a step: those over blocks of queries.

    A loop ends with a jump back; one that is entered again further behind (a wait that has to be repeated) holds others, and is left out.
    """
    jumps = [
        (int(target[1], 16), address)
        for address, text in instructions
        if (target := re.search(r"\bBRA\s+(?:\w+, )?(0x[0-9a-f]+)", text)) and int(target[1], 16) <= address
    ]
    bodies = {jump: [text for address, text in instructions if jump[0] <= address <= jump[1]] for jump in jumps}
    with_softmax = {jump: body for jump, body in bodies.items() if any("MUFU.EX2" in text for text in body)}
    return [
        body
        for (start, end), body in with_softmax.items()
        if not any((a, b) != (start, end) and a < end and start < b for a, b in with_softmax if b - a < end - start)
    ]


def described(body: list[str]) -> dict[str, Any]:
    """Counts of a loop's instructions, and what runs beside what: `order` names products, waits and arithmetic as they follow one another."""
    names = {
        "product": "HGMMA", "wait": "WARPGROUP.DEPBAR", "exponential": "MUFU.EX2", "spill": "STL|LDL", "reduction": "UTMAREDG",
        "difference": "FADD", "staged": r"STS\b",
    }  # fmt: skip
    pattern = re.compile("|".join(f"(?P<{name}>{text})" for name, text in names.items()))
    order: list[str] = []
    counts = dict.fromkeys(names, 0)
    for text in body:
        match = pattern.search(text)
        if match and match.lastgroup:
            counts[match.lastgroup] += 1
            if not order or order[-1] != match.lastgroup:
                order.append(match.lastgroup)
    return {"counts": counts, "order": order, "between_steps": between_steps(body)}


def between_steps(body: list[str]) -> int:
    """Waits and meetings between the wait that ends a step and the next step's first product: nothing is under way there."""
    ends = max(i for i, text in enumerate(body) if "WARPGROUP.DEPBAR" in text)
    begins = next(i for i, text in enumerate(body) if "HGMMA" in text)
    return sum(bool(re.search("BAR.SYNC|SYNCS", text)) for text in body[ends + 1 :] + body[:begins])


def main() -> None:
    from triton.runtime import driver

    driver.set_active(AbsentGpu(90))
    for case, variant in pickle.load(sys.stdin.buffer):
        print(json.dumps(compiled_case(case, variant)), flush=True)


if __name__ == "__main__":
    main()
