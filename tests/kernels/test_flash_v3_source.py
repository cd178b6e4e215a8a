"""flash-v3's source, run in Python with a thread for each role: right in every design, and no role ever waits in vain."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import v3_emulator
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import reference
from v3_runs import needs_gluon

needs_gluon()

SCALE = 0.125
lengths = st.integers(1, 420)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 450).map("window:{}".format))
designs = st.fixed_dictionaries(
    {
        "programs": st.integers(1, 5),
        "consumers": st.sampled_from([2, 3]),
        "block_kv": st.sampled_from([64, 128]),
        "stages": st.integers(1, 3),
        "sections": st.integers(1, 3),
        "out_tiles": st.booleans(),
        "OVERLAP": st.booleans(),
        "PINGPONG": st.booleans(),
        "QUEUE": st.booleans(),
        "CARRY": st.booleans(),
        "LAZY_RESCALE": st.booleans(),
        "EARLY_WAIT": st.booleans(),
        "NAMED_RELEASE": st.booleans(),
    }
)


def problem(
    batch: int, heads: tuple[int, int], seq_q: int, seq_kv: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    heads_q, heads_kv = heads
    shapes = ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
    q, k, v = (draw.standard_normal((batch, *shape, 64), np.float32) for shape in shapes)
    return q, k, v


def assert_right(qkv: tuple[np.ndarray, ...], mask: str, scale: float = SCALE, **design: object) -> None:
    out, lse = v3_emulator.attend(*qkv, mask=mask, scale=scale, **design)
    expected, expected_lse = (x.numpy() for x in reference(*map(torch.from_numpy, qkv), mask, scale))
    assert np.abs(out - expected).max() < 1e-5
    assert (np.isfinite(lse) == np.isfinite(expected_lse)).all()
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    design=designs, batch=st.integers(1, 2), heads_kv=st.integers(1, 2), group=st.integers(1, 2), seq_q=lengths, seq_kv=lengths, mask=masks,
    scale=st.sampled_from([SCALE, -0.2]), longest_first=st.booleans(),
)  # fmt: skip
def test_every_design_computes_attention_and_ends(
    design: dict, batch: int, heads_kv: int, group: int, seq_q: int, seq_kv: int, mask: str, scale: float, longest_first: bool
) -> None:  # fmt: skip
    qkv = problem(batch, (heads_kv * group, heads_kv), seq_q, seq_kv)
    let_by = -(-64 * (design["consumers"] - 1) // design["block_kv"]) if mask != "none" else 0
    assume(not design["CARRY"] or (design["OVERLAP"] and design["out_tiles"] and let_by < design["stages"]))
    assert_right(qkv, mask, scale, **design, LONGEST_FIRST=longest_first and mask != "none")


@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
def test_queries_that_see_no_key_give_0_and_minus_infinity(mask: str) -> None:
    assert_right(problem(1, (2, 1), 300, 90), mask, programs=2)


def test_a_producer_that_does_not_wait_for_slow_consumers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests above find a tile that is overwritten too early, because this one does.
    monkeypatch.setattr(v3_emulator, "SECONDS", 0.3)
    early = {"await_release": lambda *_: None, "pin": lambda _: time.sleep(0.02)}
    with pytest.raises((AssertionError, TimeoutError)):
        assert_right(problem(1, (1, 1), 128, 420), "none", programs=1, broken=early)


def test_a_consumer_that_gives_nothing_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v3_emulator, "SECONDS", 0.3)
    with pytest.raises(TimeoutError, match="waits for ever"):
        assert_right(problem(1, (1, 1), 128, 420), "none", programs=1, broken={"release": lambda *_: None})
