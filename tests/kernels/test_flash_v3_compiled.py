"""flash-v3 compiled ahead of time for sm_90, without a GPU: what it takes of the chip, and the order of its machine code."""

from __future__ import annotations

from typing import Any

import pytest
from children import figures_of
from machine_code import addresses_of_several_origins
from problems import AttentionProblem, attention
from v3_runs import needs_gluon

needs_gluon()
pytestmark = pytest.mark.compile

SHARED_LIMIT_BYTES = 227 * 1024
SCORES = {64: 64, 128: 64, 256: 32}
"""A thread's share of a block of scores, by head dimension: 64 queries and the keys of the design, over 128 threads."""

STEP_CLOCKS = {64: 1030, 128: 1090, 256: 880}
"""Most that a step of the loop over keys may take of a warp as the assembler scheduled it, by head dimension (machine_code.py)."""

Case = tuple[AttentionProblem, str]


def case(dim: str, mask: str, variant: str = "", *, dtype: str = "bf16", seq: str = "4096", **rest: object) -> Case:
    name = f"{variant or 'flash-v3'}, {dtype} d {dim} {mask}, {seq}"
    return attention(name, "16/4", seq, dim, dtype=dtype, mask=mask, **rest), variant


MAIN = (
    case("128", "none"), case("128", "causal"), case("64", "none"), case("256", "none"), case("128", "causal", seq="512"),
)  # fmt: skip
OTHER_PROBLEMS = (
    case("64", "causal"), case("256", "causal"), *(case(d, "window:1000") for d in ("64", "128", "256")),
    *(case(d, mask, seq="512") for d in ("64", "128", "256") for mask in ("none", "causal", "window:100")), case("128", "none", seq="1000/1100"), case("128", "causal", dtype="fp16"), case("128", "causal", seq="1/1"),
    *(case(d, "causal") for d in ("8", "72", "80", "96", "160", "192", "192/128", "64/256", "128/256")),
    case("128", "causal", scale=-0.5), case("128", "none", layouts=("packed", "transposed", "transposed")),
)  # fmt: skip
VARIANTS = (
    "bare", "overlap", "persistent", "dealt", "queue", "early-wait", "one-tile", "no-overlap", "no-pingpong", "named-release",
)  # fmt: skip
OTHER_VARIANTS = (
    *(case(d, mask, variant) for variant in VARIANTS for d, mask in (("128", "none"), ("128", "causal"))),
    *(case(d, "causal", variant) for variant in ("no-pingpong", "named-release") for d in ("64", "256")),
    *(case("128", "causal", variant, seq="512") for variant in VARIANTS),
    *(case("64", mask, "two-consumers") for mask in ("none", "causal", "window:1000")),
)  # fmt: skip


def compiled(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Figures of every case."""
    return figures_of("v3_child.py", cases)


def overlapped_softmaxes(order: list[list[Any]]) -> list[dict[str, int]]:
    """What lies between each wait for the scores and the next wait for everything: the softmaxes that run beside a product."""
    names = [name for name, _ in order]
    found = []
    for start, name in enumerate(names):
        if name == "wait for all but one":
            inside = order[start + 1 : names.index("wait for all", start)]
            found.append({what: sum(n for name, n in inside if name == what) for what, _ in inside})
    return found


def complaints(figures: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    variant, problem = figures["variant"], figures["name"]
    overlaps = variant not in ("bare", "no-overlap")
    consumers = figures["consumers"]
    registers = {240, 24} if consumers == 2 else {160, 32}
    softmaxes = overlapped_softmaxes(figures["order"])
    # In the loop over keys, and where a tile begins while the one before it ends.
    wanted_softmaxes = consumers * (1 + figures["carries"]) if overlaps else 0
    counts = {name: sum(n for what, n in figures["order"] if what == name) for name in ("load", "store")}
    votes = sum(n for what, n in figures["order"] if what == "vote")
    # At head dimension 256 a mask leaves a few registers too few for what the loop over tiles remembers: stored and read once a tile.
    allowed_spill = 0 if " none" in problem or widest(problem) <= 128 else 32
    found = {
        f"spills {figures['spilled_bytes']} bytes": figures["spilled_bytes"] > allowed_spill,
        "products wait for one another": figures["serialised"],
        f"addresses of more than one origin: {figures['stray_addresses']}": bool(figures["stray_addresses"]),
        "more shared memory than the device has": figures["shared_bytes"] > SHARED_LIMIT_BYTES,
        "more shared memory than was estimated": figures["shared_bytes"] > figures["shared_estimate_bytes"],
        "another number of threads": figures["threads"] != 128 * (consumers + 1),
        f"registers set to {figures['registers_set']}": not registers <= set(figures["registers_set"]),
        f"named barriers of Triton's own up to {figures['named_barriers'][-1]}": figures["named_barriers"][-1] > 4,
        "descriptors made on the device": figures["scratch_bytes"] > 0,
        "not loaded and stored by the copy engine": not (counts["load"] and counts["store"] >= consumers),
        f"{len(softmaxes)} softmaxes beside a product": len(softmaxes) != wanted_softmaxes,
        f"{figures['step_clocks']} clocks a step": variant == ""
        and figures["step_clocks"] > limit_of(STEP_CLOCKS, problem),
        "a softmax has no pin": any(between.get("pin", 0) == 0 for between in softmaxes),
        f"{votes} votes on rescaling": votes != consumers * figures["skips_rescaling"],
        "a softmax spills": any(between.get("spill", 0) > 0 for between in softmaxes),
    }
    # A row maximum takes a comparison for each score but the first of each of the thread's two rows, and two with other threads.
    what, wanted = (
        ("maximum", limit_of(SCORES, problem) + 2)
        if figures["waits_early"]
        else ("exponential", limit_of(SCORES, problem) + 2)
    )
    for between in softmaxes:
        found[f"{between.get(what, 0)} of {wanted} times {what} beside the product"] = between.get(what, 0) < wanted
    return [f"{problem}: {what}" for what, is_so in found.items() if is_so]


def limit_of(limits: dict[int, int], name: str) -> int:
    return next(n for d, n in limits.items() if widest(name) <= d)


def widest(name: str) -> int:
    return max(map(int, name.partition(" d ")[2].split()[0].split("/")))


def assert_compiles_well(cases: tuple[Case, ...]) -> None:
    found = compiled(cases)
    assert [figures["name"] for figures in found] == [problem.name for problem, _ in cases]
    assert "\n".join(complaint for figures in found for complaint in complaints(figures)) == ""


def test_the_kernel_fits_the_chip_and_its_softmax_runs_beside_a_product() -> None:
    assert_compiles_well(MAIN)


BRANCHED = """
        /*0000*/                   BRX R4 -0x10 ;
        /*0010*/                   UIADD3 UR10, UR4, 0x1, URZ ;
        /*0020*/                   UMOV UR11, 0x40000040 ;
        /*0030*/              @!P0 BRA 0x70 ;
        /*0040*/                   UIADD3 UR14, UP0, UR10, 0x80, URZ ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88 ;
        /*0060*/                   BRA 0x10 ;
        /*0070*/                   UMOV UR15, 0x40000040 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R88, R124, gdesc[{gdesc}].tnspB, R88 ;
        /*0090*/                   EXIT ;
"""


def test_an_address_that_one_side_of_a_branch_lacks_is_found() -> None:
    assert addresses_of_several_origins(BRANCHED.format(gdesc="UR8")) == []
    found = addresses_of_several_origins(BRANCHED.format(gdesc="UR12"))
    assert [text.split()[0] for text in found] == ["0x80"]


def test_without_overlap_no_softmax_runs_beside_a_product() -> None:
    # The same search finds nothing where there is nothing, so what it finds above is there.
    found = compiled((case("128", "none", "no-overlap"),))
    assert overlapped_softmaxes(found[0]["order"]) == []


@pytest.mark.slow
def test_so_it_is_for_other_masks_dtypes_head_dims_and_layouts() -> None:
    assert_compiles_well(OTHER_PROBLEMS)


@pytest.mark.slow
def test_so_it_is_for_every_variant() -> None:
    assert_compiles_well(OTHER_VARIANTS)
