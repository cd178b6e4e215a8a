"""The child that Nsight Compute watches: each case is prepared outside of the range that is counted, and called once inside it.

    ncu --replay-mode app-range ... python -m flashbench.measure.counters '{"cases": [KEY, ...], "device": {...}, "seed": 0}'

Nsight Compute starts it once for each pass of counters, so it does the same each time. Counters do not check: what the case
computes is checked by a sweep, and the float64 reference of 524,288 tokens would take hours.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from flashbench.measure.device import use
from flashbench.measure.memory import release
from flashbench.measure.visit import classify
from flashbench.measure.workload import make_inputs, make_operation, matmul_precision
from flashbench.providers.spec import Unsupported
from flashbench.providers.table import get
from flashbench.records import Case, Device, from_plain

WARM_CALLS = 2
"""The first compiles and fills the allocator; from the second on a call makes no allocation of its own."""
FALLBACK_L2_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """Count the cases of a request, and print as JSON what became of each. Always 0: ncu drops every result when its program fails."""
    request = json.loads(arguments[0])
    device = from_plain(Device, request["device"])
    use(device)
    for key in request["cases"]:
        try:
            answer = count(Case.from_key(key), device, request["seed"])
        except Unsupported as reason:
            answer = {"status": "unsupported", "reason": str(reason)}
        except Exception as error:
            status, reason_text = classify(error)
            answer = {"status": status, "reason": reason_text}
        print(json.dumps({"key": key, **answer}), flush=True)  # noqa: T201 - the parent reads it
        release()
    return 0


def count(case: Case, device: Device, seed: int) -> dict[str, Any]:
    """One call between cudaProfilerStart and cudaProfilerStop, with an L2 that holds neither its inputs nor anything dirty."""
    problem = case.problem
    with matmul_precision(problem.dtype):
        provider = get(case.provider)
        inputs = make_inputs(problem, seed, torch.device(device.kind, device.index), provider.computes)
        bound = provider.bind(problem, device)
        operation = make_operation(problem, bound, inputs)
        for _ in range(WARM_CALLS):
            operation.run()
        answer = {
            "status": "ok",
            "backend": bound.backend(*inputs.arguments) if bound.backend is not None else None,
            "launch": bound.launch(*inputs.arguments) if bound.launch is not None else None,
        }
        clean_l2(device)
        torch.cuda.profiler.start()
        try:
            operation.run()
            torch.cuda.synchronize()  # kernels that are still running when the range ends are not in it
        finally:
            torch.cuda.profiler.stop()
    return answer


def clean_l2(device: Device) -> None:
    """Fill the L2 with lines that were only read: a flush that writes would leave its own dirty lines to be written in the range."""
    buffer = torch.zeros(
        4 * (device.l2_bytes or FALLBACK_L2_BYTES) // 4, device=torch.device(device.kind, device.index)
    )
    for _ in range(2):  # the first pass drives out the zeros themselves
        buffer.sum()
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
