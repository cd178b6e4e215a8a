"""Compile flash-v3 on e4m3 tensors for a Hopper GPU that is not there, exactly as a call would: `python v3_fp8_child.py < cases`.

Reads pickled problems from standard input, writes JSON lines to standard output. A process of its own, as compile_child.py is.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from typing import Any

import torch
from compile_child import AbsentGpu, limits_of
from problems import AttentionProblem
from v3_child import SMS, compiled_launch, machine_code

MARKS = {
    "product": r"QGMMA\.\S*E4M3\.E4M3\b",
    "16-bit product": r"HGMMA\b",
    "wait for all but one": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b",
    "wait for all": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b",
    "exponential": r"MUFU\.EX2\b",
    "pair in e4m3": r"F2FP\.SATFINITE\.E4M3\b",
    "bytes moved": r"PRMT\b",
    "shuffle": r"SHFL\b",
    "pin": r"BAR\.ARV 0xf,",
    "spill": r"(?:STL|LDL)\b",
    "load": r"UTMALDG\.4D\b",
    "store": r"UTMASTG\.4D\b",
}
"""What the machine code is read by."""


def e4m3(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float8_e4m3fn, device="meta")


def attention_case(case: AttentionProblem) -> dict[str, Any]:
    """What the compiler and the assembler say of the attention kernel for one problem."""
    from flashbench.kernels import flash_v3_fp8 as fp8
    from flashbench.kernels import flash_v3_launches as v3

    v3.device_limits = lambda _: limits_of(90)
    v3.sm_count = lambda _: SMS
    p = case.problem
    launch = fp8.prepare(
        e4m3(p.batch, p.heads_q, p.seq_q, p.head_dim), e4m3(p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        e4m3(p.batch, p.heads_kv, p.head_dim_v, -(-p.seq_kv // 32) * 32), torch.empty(p.batch, p.heads_kv, 3, device="meta"),
        mask=p.mask, scale=case.scale, with_lse=True,
    )  # fmt: skip
    figures, _, sass = compiled_launch(case, launch, element_bytes=1)
    return figures | {"exponentials": 64 * launch.design.block_kv // 128, "marks": marks(sass)}


def keys_last_case(case: AttentionProblem) -> dict[str, Any]:
    """Bytes that a thread of the kernel that transposes V moves at once, and whether it spills."""
    from flashbench.kernels.flash_v3_keys_last import keys_last_launch

    p = case.problem
    launch, _ = keys_last_launch(e4m3(p.batch, p.heads_kv, p.seq_kv, p.head_dim_v))
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    sass = machine_code(compiled.asm["cubin"])
    return {
        "name": case.name,
        "loads": sorted(set(re.findall(r"\bLDG\.E\.?(\S*)", sass))),
        "stores": sorted(set(re.findall(r"\bSTG\.E\.?(\S*)", sass))),
        "spills": bool(re.search(r"\b(?:STL|LDL)\b", sass)),
    }


def marks(sass: str) -> list[str]:
    """The instructions of MARKS by name, as they follow one another."""
    pattern = re.compile("|".join(f"({text})" for text in MARKS.values()))
    names = list(MARKS)
    return [names[match.lastindex - 1] for match in pattern.finditer(sass)]


def main() -> None:
    from triton.runtime import driver

    driver.set_active(AbsentGpu(90))
    for what, case in pickle.load(sys.stdin.buffer):
        found = keys_last_case(case) if what == "keys last" else attention_case(case)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
