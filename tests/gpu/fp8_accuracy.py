"""How far attention on e4m3 tensors is from that of the tensors as they were: `python tests/gpu/fp8_accuracy.py`, seconds on a Hopper GPU.

Root of the mean squared error against float64 of what was drawn, before any rounding, dense; on N(0, 1), and on N(0, 1) with N(0, 100) on top
of one entry in a thousand (FlashAttention-3, arXiv 2407.08608, section 4.3 and table 3, which has one scale a tensor). bf16 stands beside it, and
FlashAttention-3 itself where a package of it is installed. What cannot run here is named below the table, with its reason.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from flashbench.kernels.quantization import Quantized, quantized
from flashbench.measure.device import describe
from flashbench.providers.spec import Unsupported
from flashbench.providers.table import get
from flashbench.records import Device, Problem

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from problems import reference
from v3_fp8_runs import outliers, rmse

COLUMNS = [
    (name, dtype, scales)
    for name in ("flash-v3", "fa3")
    for dtype, scales in (("bf16", ""), ("fp8", "a head"), ("fp8", "a tensor"))
]
"""Provider, dtype, and what has one scale."""
DRAWN = {"N(0, 1)": torch.randn, "outliers": outliers}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def with_one_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """As `quantized`, with one scale for the whole of each tensor."""
    flat = quantized(*(x.reshape(1, 1, -1, x.shape[3]) for x in (q, k, v)))
    descales = flat.descales.expand(*k.shape[:2], 3).contiguous()
    return Quantized(flat.q.view(q.shape), flat.k.view(k.shape), flat.v.view(v.shape), descales)


def error(column: tuple[str, str, str], tensors: list[torch.Tensor], expected: torch.Tensor, device: Device) -> float:
    """The error of a column; Unsupported, with the reason, where it cannot run here."""
    name, dtype, scales = column
    batch, heads, seq, dim = tensors[0].shape
    problem = Problem(batch, heads, heads, seq, seq, dim, dim, dtype)
    reason = get(name).unsupported(problem, device)
    if reason:
        raise Unsupported(reason)
    if dtype == "bf16":
        given = tuple(x.bfloat16() for x in tensors)
    else:
        given = quantized(*tensors) if scales == "a head" else with_one_scale(*tensors)
    return rmse(get(name).bind(problem, device).call(*given), expected)


def main() -> None:
    asked = arguments()
    device = describe("auto")
    dims, lengths = (list(map(int, text.split(","))) for text in (asked.head_dims, asked.lengths))
    titles = [" ".join((name, dtype, f"({scales})" if scales else "")).strip() for name, dtype, scales in COLUMNS]
    print("| inputs | head_dim | keys |", " | ".join(titles), "|")
    print("|" + "---|" * (3 + len(titles)))
    reasons: dict[str, str] = {}
    for drawn, dim, length in itertools.product(DRAWN, dims, lengths):
        torch.manual_seed(asked.seed)
        tensors = [DRAWN[drawn](1, asked.heads, length, dim, device=device.kind) for _ in range(3)]
        expected, _ = reference(*tensors)
        cells = []
        for title, column in zip(titles, COLUMNS, strict=True):
            try:
                cells.append(f"{error(column, tensors, expected, device):.1e}")
            except Unsupported as refusal:
                reasons[title] = str(refusal)
                cells.append("-")
        print(f"| {drawn} | {dim} | {length} |", " | ".join(cells), "|", flush=True)
    for title, reason in reasons.items():
        print(f"{title}: {reason}")


if __name__ == "__main__":
    main()
