"""The check: what counts as right, and what does not."""

from __future__ import annotations

import pytest
import torch

from flashbench.measure.check import NORM_CAP, check_results
from flashbench.measure.reference import Reference, error_norm, make_reference
from flashbench.measure.workload import Inputs, make_inputs
from flashbench.records import Device, Problem

CPU = Device("cpu", "test", 1 << 34)


def problem(dtype: str = "fp32", **changes: object) -> Problem:
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seq_q": 40, "seq_kv": 40, "head_dim": 16, "head_dim_v": 16}
    return Problem(**{**sizes, "dtype": dtype, **changes})  # type: ignore[arg-type]


def reference_of(true: torch.Tensor, naive_norm: float = 0.0, naive_max: float = 0.0) -> Reference:
    return Reference({"out": true}, {"out": naive_norm}, {"out": naive_max}, "float64")


def plain(inputs: Inputs, dtype: torch.dtype, hidden: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v


def test_the_reference_is_plain_attention_in_float64() -> None:
    inputs = make_inputs(problem(), 0, torch.device("cpu"))
    reference = make_reference(problem(), inputs, CPU)
    assert reference.dtype == "float64"
    assert torch.allclose(reference.true["out"], plain(inputs, torch.float64), rtol=0, atol=1e-14)


def test_gradients_of_the_reference_are_those_of_autograd() -> None:
    asked = problem(mode="backward", mask="causal", heads_q=4, seq_q=33, seq_kv=47)
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    reference = make_reference(asked, inputs, CPU)
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    hidden = torch.ones(33, 47, dtype=torch.bool).triu(47 - 33 + 1)
    grouped = Inputs(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), None)
    out = plain(grouped, torch.float64, hidden)
    assert inputs.grad_out is not None
    gradients = torch.autograd.grad(out, (q, k, v), inputs.grad_out.double())
    for name, expected in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert error_norm(reference.true[name], expected) < 1e-14


def test_a_short_dtype_is_held_to_its_own_plain_error_not_to_another_short_result() -> None:
    # NU-02: fp16 flash against fp16 naive says nothing; both are compared with float64, and naive's own error is stored.
    asked = problem("fp16", seq_q=512, seq_kv=512, head_dim=64, head_dim_v=64)
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    reference = make_reference(asked, inputs, CPU)
    outcome = check_results(asked, reference, {"out": plain(inputs, torch.float16)})
    assert outcome.problem is None
    assert outcome.check is not None
    assert 0 < outcome.check.naive_error_norm < 1e-3
    assert outcome.check.error_norm <= 2 * outcome.check.naive_error_norm + 2e-4


def test_zeros_in_the_reference_do_not_make_an_error_infinite() -> None:
    # NU-03: a relative error by element is infinite where the truth is zero.
    true = torch.tensor([0.0, 1e-6, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    outcome = check_results(
        problem(seq_q=3, head_dim_v=1, heads_q=1, heads_kv=1), reference_of(true), {"out": (true + 1e-4).float()}
    )
    assert outcome.check is not None
    assert outcome.check.error_norm == pytest.approx(1.73e-4, rel=0.01)
    assert outcome.check.error_max == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(("value", "true"), [(-1.0, -5.0), (-5.0, -5.0 + 5e-3)])
def test_negative_tensors_are_compared_by_magnitude(value: float, true: float) -> None:
    # NU-04: dividing by the signed maximum made every all-negative tensor pass.
    shape = (1, 2, 40, 16)
    outcome = check_results(
        problem(), reference_of(torch.full(shape, true, dtype=torch.float64)), {"out": torch.full(shape, value)}
    )
    assert outcome.problem is not None


def test_one_unit_in_the_last_place_is_right() -> None:
    # NU-05: bf16 has a unit of 2^-10 at 0.2; a tolerance below it makes CI flip on one element.
    shape = (1, 2, 40, 16)
    true = torch.full(shape, 0.2, dtype=torch.float64)
    value = true.to(torch.bfloat16)
    value[0, 0, 0, 0] += 2.0**-10
    assert check_results(problem("bf16"), reference_of(true, 1e-3, 1e-3), {"out": value}).problem is None


def test_plain_attention_itself_can_fail_because_the_tolerance_is_capped() -> None:
    true = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    awful = true.float() * (1 + 2 * NORM_CAP["fp32"])
    reference = reference_of(true, naive_norm=1.0, naive_max=10.0)
    outcome = check_results(problem(), reference, {"out": awful})
    assert outcome.problem is not None
    assert "normwise" in outcome.problem


def test_one_wrong_row_of_many_is_found() -> None:
    asked = problem(seq_q=4000)
    true = torch.randn(1, 2, 4000, 16, dtype=torch.float64)
    value = true.to(torch.float32)
    value[0, 1, 1234] += 1e-4
    outcome = check_results(asked, reference_of(true, 1e-7, 1e-7), {"out": value})
    assert outcome.problem is not None


def test_infinities_are_counted_on_both_sides_and_never_compare_equal() -> None:
    true = torch.zeros(1, 2, 40, 16, dtype=torch.float64)
    true[0, 0, 0, 0] = float("inf")
    outcome = check_results(problem(), reference_of(true), {"out": true.float()})
    assert outcome.problem == "out has 1 non-finite values of 1280, the reference has 1"


@pytest.mark.parametrize("mask", ["none", "causal", "window:7"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(40, 40), (9, 40), (40, 9), (1, 8)])
def test_chunks_of_the_reference_do_not_change_it(
    monkeypatch: pytest.MonkeyPatch, mask: str, seq_q: int, seq_kv: int
) -> None:
    asked = problem(mask=mask, seq_q=seq_q, seq_kv=seq_kv, mode="backward", heads_q=4)
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    whole = make_reference(asked, inputs, CPU).true
    monkeypatch.setattr("flashbench.measure.reference.CPU_CHUNK_ELEMENTS", 96)
    for name, pieces in make_reference(asked, inputs, CPU).true.items():
        assert error_norm(pieces, whole[name]) < 1e-13


@pytest.mark.parametrize(("keys", "seed"), [(4096, 1), (16384, 0), (65536, 2)])
def test_exact_fp32_over_a_long_cache_is_right_although_it_adds_up_in_another_order(keys: int, seed: int) -> None:
    asked = problem(batch=2, heads_q=8, seq_q=1, seq_kv=keys, head_dim=64, head_dim_v=64, mode="decode")
    inputs = make_inputs(asked, seed, torch.device("cpu"))
    reference = make_reference(asked, inputs, CPU)
    out = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, enable_gqa=True)
    assert check_results(asked, reference, {"out": out}).problem is None
