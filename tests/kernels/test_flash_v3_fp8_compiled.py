"""flash-v3 on e4m3 tensors compiled ahead of time for sm_90, without a GPU: what it takes of the chip, and the order of its machine code."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from children import figures_of
from problems import AttentionProblem, attention
from v3_runs import needs_gluon

needs_gluon()
pytestmark = pytest.mark.compile

SHARED_LIMIT_BYTES = 227 * 1024


def case(dim: str, mask: str, seq: str = "4096", **rest: object) -> AttentionProblem:
    return attention(f"e4m3 d {dim} {mask}, {seq}", "16/4", seq, dim, dtype="fp8", mask=mask, **rest)


MAIN = (case("128", "none"), case("128", "causal"), case("256", "none"))
OTHERS = (
    case("64", "none"), case("64", "causal"), case("256", "causal"), *(case(d, "window:1000") for d in ("64", "128", "256")),
    case("128", "none", "1000/1100"), case("128", "causal", "1/1"), *(case(d, "causal") for d in ("16", "80", "96", "192", "192/128", "64/256")),
    case("128", "causal", scale=-0.5),
)  # fmt: skip


def compiled(cases: tuple[AttentionProblem, ...], what: str = "attention") -> list[dict[str, Any]]:
    """Figures of every case."""
    return figures_of("v3_fp8_child.py", [(what, each) for each in cases])


def beside_products(marks: list[str]) -> list[collections.Counter[str]]:
    """What lies between each wait for the scores and the next wait for everything: the softmaxes that run beside a product."""
    starts = [i for i, mark in enumerate(marks) if mark == "wait for all but one"]
    return [collections.Counter(marks[i + 1 : marks.index("wait for all", i)]) for i in starts]


def complaints(figures: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    consumers = figures["consumers"]
    count = collections.Counter(figures["marks"])
    softmaxes = beside_products(figures["marks"])
    found = {
        f"spills {figures['spilled_bytes']} bytes": figures["spilled_bytes"] > 0,
        "products wait for one another": figures["serialised"],
        f"addresses of more than one origin: {figures['stray_addresses']}": bool(figures["stray_addresses"]),
        "more shared memory than the device has": figures["shared_bytes"] > SHARED_LIMIT_BYTES,
        "more shared memory than was estimated": figures["shared_bytes"] > figures["shared_estimate_bytes"],
        "products of other than e4m3": count["16-bit product"] > 0 or count["product"] == 0,
        "not loaded and stored by the copy engine": not (count["load"] and count["store"] >= consumers),
        f"{len(softmaxes)} softmaxes beside a product": len(softmaxes) != consumers * (1 + figures["carries"]),
    }
    # Where the product is waited for at the row maxima, and rescaling comes next, the weights are made behind it.
    exponentials = 0 if figures["waits_early"] and figures["skips_rescaling"] else figures["exponentials"]
    # The first softmax of a consumer is that of its loop over keys, where its weights become an operand.
    for softmax in softmaxes[:: 1 + figures["carries"]]:
        pairs = softmax["pair in e4m3"]
        found[f"{pairs} pairs of weights made beside the product, not {exponentials // 2}"] = pairs != exponentials // 2
    for softmax in softmaxes:
        # Two more, one a row of the thread, rescale what was summed before.
        found[f"{softmax['exponential']} exponentials beside the product"] = softmax["exponential"] != exponentials + 2
        found["a softmax has no pin"] = not softmax["pin"]
        found[f"{softmax['bytes moved']} times bytes are moved"] = softmax["bytes moved"] > 0
        # A row's largest score, of two rows, over four threads; and what is told of the next tile.
        found[f"{softmax['shuffle']} shuffles in a softmax"] = softmax["shuffle"] > 6
    return [f"{figures['name']}: {what}" for what, is_so in found.items() if is_so]


def assert_compiles_well(cases: tuple[AttentionProblem, ...]) -> None:
    found = compiled(cases)
    assert [figures["name"] for figures in found] == [each.name for each in cases]
    assert "\n".join(complaint for figures in found for complaint in complaints(figures)) == ""


def test_weights_become_an_operand_beside_a_product_and_no_byte_is_moved() -> None:
    assert_compiles_well(MAIN)


@pytest.mark.slow
def test_so_it_is_for_other_masks_and_head_dims() -> None:
    assert_compiles_well(OTHERS)


def test_v_is_transposed_by_16_bytes_at_a_time() -> None:
    for figures in compiled((case("64", "none"), case("128", "none", "1100"), case("256", "none")), "keys last"):
        assert figures == {"name": figures["name"], "loads": ["128"], "stores": ["128"], "spills": False}
