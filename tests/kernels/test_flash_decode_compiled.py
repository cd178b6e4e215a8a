"""The decoding kernel compiled ahead of time, without a GPU: wide loads, no spills, and room for enough programs on a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest
from children import figures_of
from problems import AttentionProblem, attention

pytestmark = pytest.mark.compile

CONTIGUOUS = tuple(
    attention(f"bf16 d {d}", "32/8", "1/8192", str(d), dtype="bf16", batch=16) for d in (64, 80, 128, 256)
)
PAGED = tuple(
    attention(f"bf16 d {d}, pages of {page}", "32/8", "1/8192", str(d), dtype="bf16", batch=16).but(page_size=page)
    for d, page in ((64, 16), (128, 16), (128, 256), (80, 7))
)
OTHERS = (
    attention("one long sequence", "32/8", "1/131072", "128", dtype="bf16"),
    attention("a tail, four queries", "32/8", "4/8191", "128", dtype="bf16", mask="causal"),
    attention("a window", "32/8", "1/8191", "128", dtype="bf16", mask="window:1000"),
    attention("64 rows", "64/1", "1/8192", "128", dtype="bf16"),
    attention("one split", "32", "1/8192", "128", dtype="bf16", batch=64),
    attention("channels first", "8/2", "1/1100", "128", layouts=("channels-first",) * 3),
    attention("one of everything", "1", "1", "1"),
    attention("tf32", "32/8", "1/8192", "128", dtype="tf32"),
    attention("fp32", "32/8", "1/8192", "128", dtype="fp32"),
)
CASES: tuple[AttentionProblem, ...] = (*CONTIGUOUS, *PAGED, *OTHERS)
MAIN = {case.name for case in (*CONTIGUOUS, *PAGED)}
KIB = 1024


def compiled(target: int) -> list[dict[str, Any]]:
    """Figures of every kernel of every case for a target."""
    return figures_of("compile_child.py", CASES, str(target), "decode")


def complaints(figures: dict[str, Any], target: int) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    name, used = figures["name"], figures["instructions"]
    if figures["kernel"] == "combine":
        found = {
            "spills": figures["spilled_bytes"] > 0,
            "reads the parts before they are written": target >= 90 and not figures["waits_before_it_reads"],
        }
    else:
        main_shape = name in MAIN
        through_engine = target >= 90 and name in {case.name for case in CONTIGUOUS}
        found = {
            f"spills {figures['spilled_bytes']} bytes": figures["spilled_bytes"] > (0 if main_shape else 64)
            and name != "channels first",
            # Two programs on a multiprocessor at the least, three on the main shapes of sm_90: what is under way hides the latency.
            f"{figures['registers']} registers": figures["registers"] > (168 if main_shape and target == 90 else 255),
            "too much shared memory for three programs": main_shape
            and target >= 90
            and 3 * (figures["shared_bytes"] + KIB) > figures["shared_limit_bytes"] + KIB,
            "more shared memory than was estimated": figures["shared_bytes"] > figures["shared_estimate_bytes"],
            "not loaded by the copy engine": through_engine and not used["UTMALDG"],
            "not loaded 16 bytes at a time": main_shape
            and not through_engine
            and not 48 <= figures["wide_copies"] <= used["LDGSTS"],
            "no matrix unit": main_shape and not used["HMMA"],
            "exact fp32 on a matrix unit": name == "fp32" and bool(used["HMMA"]),
        }
    return [f"{name}, {figures['kernel']}: {what} ({figures['blocks']})" for what, is_so in found.items() if is_so]


@pytest.mark.parametrize("target", [80, 90, 100], ids="sm_{}".format)
def test_the_default_blocks_leave_room_for_many_loads_under_way(target: int) -> None:
    """One test for each target, since the child compiles for a quarter of a minute; it names every case that is not as it should be."""
    found = compiled(target)
    assert [figures["name"] for figures in found if figures["kernel"] == "splits"] == [case.name for case in CASES]
    assert "\n".join(complaint for figures in found for complaint in complaints(figures, target)) == ""
