"""Compile flash-v3 for a Hopper GPU that is not there, exactly as a call would: `python v3_child.py < cases`.

Reads pickled (problem, variant) pairs from standard input, writes JSON lines to standard output. A process of its own, as compile_child.py is.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
from typing import Any

from compile_child import AbsentGpu, limits_of, meta_inputs
from machine_code import addresses_of_several_origins, stall_clocks
from problems import AttentionProblem

SMS = 132
INSTRUCTIONS = {
    "exponential": r"MUFU\.EX2\b",
    "product": r"HGMMA\b",
    "wait for all but one": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b",
    "wait for all": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b",
    "pin": r"BAR\.ARV 0xf,",
    "spill": r"(?:STL|LDL)\b",
    "load": r"UTMALDG\.4D\b",
    "store": r"UTMASTG\.4D\b",
    "maximum": r"FMNMX\b",
    "vote": r"VOTE\.ANY\b",
}
"""What the order of the machine code is read by."""


def compiled_case(case: AttentionProblem, variant: str) -> dict[str, Any]:
    """What the compiler and the assembler say of the kernel for one problem."""
    from flashbench.kernels import flash_v3_launches as v3

    v3.device_limits = lambda _: limits_of(90)
    v3.sm_count = lambda _: SMS
    launch = v3.prepare(*meta_inputs(case), mask=case.problem.mask, scale=case.scale, with_lse=True, variant=variant)
    figures, ptx, sass = compiled_launch(case, launch)
    return figures | {
        "variant": variant,
        "threads": int(re.search(r"\.reqntid (\d+)", ptx)[1]),
        "registers_at_launch": int(re.search(r"\.maxnreg (\d+)", ptx)[1]),
        "registers_set": sorted({int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}),
        "named_barriers": sorted({int(n) for n in re.findall(r"bar(?:rier)?\.sync\s+(\d+)", ptx)}),
        "step_clocks": min(stall_clocks(sass), default=0),
        "order": order(sass),
    }


def compiled_launch(case: AttentionProblem, launch: Any, element_bytes: int = 2) -> tuple[dict[str, Any], str, str]:
    """Figures of a launch of the kernel, whatever its elements are, its PTX and its machine code."""
    from flashbench.kernels.flash_v3 import flash_v3_kernel
    from flashbench.kernels.flash_v3_designs import tile_bytes

    compiled = flash_v3_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    ptx, sass = compiled.asm["ptx"], machine_code(compiled.asm["cubin"])
    log = assembler_log(ptx)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled
    p, constants = case.problem, launch.constants
    places = {"out_tiles": constants["OUT_TILES"], "q_places": 1 + constants["CARRY"], "element_bytes": element_bytes}
    figures = {
        "name": case.name,
        "consumers": launch.design.consumers,
        "carries": constants["CARRY"],
        "waits_early": launch.design.early_wait,
        "skips_rescaling": launch.design.lazy_rescale,
        "spilled_bytes": int(spilled[1]),
        "serialised": "wgmma.mma_async instructions are serialized" in log,
        "shared_bytes": compiled.metadata.shared,
        "shared_estimate_bytes": tile_bytes(launch.design, p.head_dim, p.head_dim_v, **places),
        "scratch_bytes": compiled.metadata.global_scratch_size,
        "stray_addresses": addresses_of_several_origins(sass),
    }
    return figures, ptx, sass


def assembler_log(ptx: str) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def machine_code(cubin: bytes) -> str:
    """The whole of it; Triton's own listing ends after 4,096 instructions, where addresses have a fifth digit."""
    from triton import knobs

    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def order(sass: str) -> list[tuple[str, int]]:
    """The instructions of INSTRUCTIONS as they follow one another, runs of the same counted."""
    pattern = re.compile("|".join(f"({text})" for text in INSTRUCTIONS.values()))
    names = list(INSTRUCTIONS)
    found: list[tuple[str, int]] = []
    for match in pattern.finditer(sass):
        name = names[match.lastindex - 1]
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found


def main() -> None:
    from triton.runtime import driver

    driver.set_active(AbsentGpu(90))
    for case, variant in pickle.load(sys.stdin.buffer):
        print(json.dumps(compiled_case(case, variant)), flush=True)


if __name__ == "__main__":
    main()
