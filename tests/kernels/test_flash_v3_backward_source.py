"""The source of flash-v3's backward kernel, run in Python with a thread for each role: right in every design, and no role ever waits in vain."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
import v3_emulator
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from problems import visible_keys
from v3_runs import needs_gluon

needs_gluon()

SCALE = 0.125
lengths = st.integers(1, 420)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 450).map("window:{}".format))
designs = st.fixed_dictionaries(
    {"halves": st.sampled_from([1, 2]), "stages": st.sampled_from([2, 3]), "sections": st.integers(1, 3)}
)


def problem(batch: int, heads: tuple[int, int], seq_q: int, seq_kv: int, channels: int = 64) -> tuple[np.ndarray, ...]:
    """q, k, v and the output's gradient."""
    draw = np.random.default_rng(0)
    heads_q, heads_kv = heads
    shapes = ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv), (heads_q, seq_q))
    q, k, v, d_out = (draw.standard_normal((batch, *shape, channels), np.float32) for shape in shapes)
    return q, k, v, d_out


def plain(given: tuple[np.ndarray, ...], mask: str, scale: float) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Log-sum-exp, delta, and dQ, dK, dV of plain attention, by autograd in float64."""
    q, k, v, d_out = (torch.from_numpy(x).double() for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    group = q.shape[1] // k.shape[1]
    seen = visible_keys(mask, q.shape[2], k.shape[2])
    s = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    out = (s - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp() @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    rows = (lse, (out * d_out).sum(-1))
    lse_row, delta = (x.detach().numpy().astype(np.float32) for x in rows)
    return lse_row, delta, [x.numpy() for x in gradients]


def assert_right(given: tuple[np.ndarray, ...], mask: str, scale: float = SCALE, **design: object) -> None:
    lse, delta, expected = plain(given, mask, scale)
    gradients = v3_emulator.differentiate(*given, lse, delta, mask=mask, scale=scale, **design)
    (_, heads_q, seq_q, _), (_, heads_kv, keys, _) = given[0].shape, given[1].shape
    queries = heads_q // heads_kv * seq_q
    for got, wanted, terms in zip(gradients, expected, (keys, queries, queries), strict=True):
        # What rounding leaves of terms that cancel, as all do in dK of a single key, grows with the root of their number.
        assert np.abs(got - wanted).max() < 2e-6 * (10 + math.sqrt(terms) + np.abs(wanted).max())


@example(
    design={"halves": 1, "stages": 2, "sections": 1}, batch=2, heads_kv=2, group=2, seq_q=420, seq_kv=1, mask="none", scale=-0.2,
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    design=designs, batch=st.integers(1, 2), heads_kv=st.integers(1, 2), group=st.integers(1, 2), seq_q=lengths, seq_kv=lengths, mask=masks,
    scale=st.sampled_from([SCALE, -0.2, 0.0]),
)  # fmt: skip
def test_every_design_differentiates_attention_and_ends(
    design: dict, batch: int, heads_kv: int, group: int, seq_q: int, seq_kv: int, mask: str, scale: float
) -> None:
    assert_right(problem(batch, (heads_kv * group, heads_kv), seq_q, seq_kv), mask, scale, **design)


@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
def test_at_head_dimension_128_each_consumer_makes_half_of_the_channels_of_dq(mask: str) -> None:
    assert_right(problem(1, (2, 1), 200, 300, 128), mask, 0.09)


@pytest.mark.parametrize("mask", ["causal", "window:10"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(300, 90), (40, 400), (1, 1)])
def test_queries_that_see_no_key_and_keys_that_none_sees_have_gradient_0(seq_q: int, seq_kv: int, mask: str) -> None:
    assert_right(problem(1, (2, 1), seq_q, seq_kv), mask)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_keys_that_do_not_exist_do_not_overflow_where_scores_are_very_negative(mask: str, halves: int) -> None:
    given = problem(1, (1, 1), 77, 77)
    for x in given[:2]:
        x[...] *= 0.1
    given[0][..., 0], given[1][..., 0] = 1.0, -500.0 / SCALE
    lse, delta, expected = plain(given, mask, SCALE)
    gradients = v3_emulator.differentiate(*given, lse, delta, mask=mask, scale=SCALE, halves=halves)
    for got, wanted in zip(gradients, expected, strict=True):
        assert np.isfinite(got).all()
        # Without the channel that makes the scores: 4,000 times what rounding leaves of a sum that is 0.
        assert np.abs(got - wanted)[..., 1:].max() < 1e-3


def test_without_dq_the_other_gradients_are_the_same() -> None:
    given = problem(1, (2, 1), 200, 300)
    lse, delta, expected = plain(given, "causal", SCALE)
    _, dk, dv = v3_emulator.differentiate(*given, lse, delta, mask="causal", scale=SCALE, with_dq=False)
    assert np.abs(dk - expected[1]).max() < 2e-5
    assert np.abs(dv - expected[2]).max() < 2e-5


def test_consumers_that_do_not_meet_before_dq_are_found_out() -> None:
    # One of them is late with its dS, so that the other reads what was there before.
    def fence() -> None:
        if threading.current_thread().name == "role 0":
            time.sleep(0.02)

    late = {"named_barrier": lambda *_: None, "fence_async_shared": fence}
    with pytest.raises(AssertionError):
        assert_right(problem(1, (1, 1), 420, 128), "none", broken=late)


def test_a_producer_that_overtakes_the_consumers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v3_emulator, "SECONDS", 0.3)
    slow = {"fence_async_shared": lambda: time.sleep(0.02)}
    monkeypatch.setattr(
        v3_emulator.Mbarrier, "wait", lambda self, parity, original=v3_emulator.Mbarrier.wait: None if self.count == 2 else original(self, parity)
    )  # fmt: skip
    with pytest.raises((AssertionError, TimeoutError)):
        assert_right(problem(1, (1, 1), 420, 128), "none", broken=slow)
