"""flash-v3's backward kernel compiled ahead of time for sm_90, without a GPU: what it takes of the chip, and the order of its machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
from children import figures_of
from problems import AttentionProblem, attention
from v3_runs import needs_gluon

needs_gluon()
pytestmark = pytest.mark.compile

SHARED_LIMIT_BYTES = 227 * 1024
Case = tuple[AttentionProblem, str]


def case(dim: str, mask: str, variant: str = "", *, dtype: str = "bf16", seq: str = "4096", **rest: object) -> Case:
    name = f"{variant or 'flash-v3'}, {dtype} d {dim} {mask}, {seq}"
    return attention(name, "16/4", seq, dim, dtype=dtype, mask=mask, **rest), variant


MAIN = tuple(case(d, mask) for d in ("64", "128") for mask in ("none", "causal"))
OTHER = (
    *(case(d, "window:1000") for d in ("64", "128")), case("128", "none", seq="1000/1100"), case("64", "none", seq="1000/1100"),
    *(case(d, mask, "deterministic") for d in ("64", "128") for mask in ("none", "causal")), case("128", "causal", dtype="fp16"),
    case("128", "causal", seq="1/1"), *(case(d, "causal") for d in ("8", "72", "96", "128/64", "64/128")), case("128", "causal", scale=-0.5),
    case("128", "none", layouts=("packed", "transposed", "transposed")),
)  # fmt: skip


def compiled(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Figures of every case."""
    return figures_of("v3_backward_child.py", cases)


LETTERS = {"product": "P", "wait": "w", "exponential": "e", "difference": "d", "staged": "s", "reduction": "r"}


def hidden(order: list[str], halves: int) -> bool:
    """Whether a loop's arithmetic runs beside products: nothing is waited for between asking for dP and the exponentials, dS is made between
    the wait for dP and the next product, and dQ is stored after the next scores are asked for and before the wait that ends the step."""
    text = re.sub(r"(.)\1+", r"\1", "".join(LETTERS.get(name, "") for name in order))
    softmax, d_s = "P?e(Pe)*P", "wdP"  # products are asked for until the first exponential, or between some
    next_half = f"w{softmax}{d_s}" * (halves - 1)
    return re.fullmatch(f"{softmax}{d_s}{next_half}wPwsrw", text) is not None


def complaints(figures: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    problem = figures["name"]
    adds = not problem.startswith("deterministic")
    halves = 1 if widest(problem) > 64 else 2
    # Steady, and one more loop for each kind of masked block, in the code of both consumers.
    tail = " none, 1000" in problem
    loops = 2 * (1 + tail + ("causal" in problem or "window" in problem) + ("window" in problem))
    found = {
        "products wait for one another": figures["serialised"],
        "more shared memory than the device has": figures["shared_bytes"] > SHARED_LIMIT_BYTES,
        "more shared memory than was estimated": figures["shared_bytes"] > figures["shared_estimate_bytes"],
        f"registers set to {figures['registers_set']}": not {240, 24} <= set(figures["registers_set"]),
        f"named barriers of Triton's own up to {figures['named_barriers'][-1]}": figures["named_barriers"][-1] > 4,
        "descriptors made on the device": figures["scratch_bytes"] > 0,
        f"{len(figures['loops'])} loops over blocks of queries, not {loops}": len(figures["loops"]) != loops,
        f"{figures['reductions']} additions by the copy engine": figures["reductions"] != (loops if adds else 0),
    }
    for loop in figures["loops"]:
        counts = loop["counts"]
        found[f"a loop with {counts['exponential']} exponentials"] = counts["exponential"] != 32 * halves
        found[f"a loop with {counts['spill']} spills"] = counts["spill"] > 0
        found[f"{loop['between_steps']} waits between steps"] = loop["between_steps"] > 0
        found[f"nothing runs beside products: {loop['order']}"] = adds and not hidden(loop["order"], halves)
    return [f"{problem}: {what}" for what, is_so in found.items() if is_so]


def widest(name: str) -> int:
    return max(map(int, name.partition(" d ")[2].split()[0].split("/")))


def assert_compiles_well(cases: tuple[Case, ...]) -> None:
    found = compiled(cases)
    assert [figures["name"] for figures in found] == [problem.name for problem, _ in cases]
    assert "\n".join(complaint for figures in found for complaint in complaints(figures)) == ""


def test_the_kernel_fits_the_chip_and_its_arithmetic_runs_beside_products() -> None:
    assert_compiles_well(MAIN)


@pytest.mark.slow
def test_so_it_is_for_other_masks_dtypes_head_dims_layouts_and_without_dq() -> None:
    assert_compiles_well(OTHER)
