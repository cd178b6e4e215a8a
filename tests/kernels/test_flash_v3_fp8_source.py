"""flash-v3 on e4m3 tensors, run in Python with a thread for each role, and what prepares its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import v3_emulator
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import reference
from v3_fp8_runs import InE4M3, keys_in_place, outliers, powers_of_two, rmse, transposed, with_descales
from v3_runs import needs_gluon

from flashbench.errors import UsageError

needs_gluon()

E4M3 = torch.float8_e4m3fn
lengths = st.integers(1, 420)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 450).map("window:{}".format))
designs = st.fixed_dictionaries(
    {
        "programs": st.integers(1, 5),
        "consumers": st.sampled_from([2, 3]),
        "block_kv": st.sampled_from([64, 128]),
        "stages": st.integers(1, 4),
        "OVERLAP": st.booleans(),
        "PINGPONG": st.booleans(),
        "QUEUE": st.booleans(),
        "CARRY": st.booleans(),
        "EARLY_WAIT": st.booleans(),
        "LAZY_RESCALE": st.booleans(),
    }
)


def attended(problem: InE4M3, mask: str, scale: float, **design: object) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = problem.units
    found = v3_emulator.attend(
        q.numpy(),
        k.numpy(),
        keys_in_place(v).numpy(),
        mask=mask,
        scale=scale,
        descales=problem.descales.numpy(),
        **design,
    )
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def assert_exact(problem: InE4M3, mask: str, scale: float, **design: object) -> None:
    out, lse = attended(problem, mask, scale, **design)
    expected, expected_lse = reference(*problem.exact, mask, scale)
    assert (out - expected).abs().max() < 1e-4  # of values up to 24
    assert (lse.isfinite() == expected_lse.isfinite()).all()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    design=designs, batch=st.integers(1, 2), heads_kv=st.integers(1, 2), group=st.integers(1, 2), seq_q=lengths, seq_kv=lengths, mask=masks,
    negative=st.booleans(),
)  # fmt: skip
def test_weights_that_e4m3_holds_give_exact_outputs_in_every_design(
    design: dict, batch: int, heads_kv: int, group: int, seq_q: int, seq_kv: int, mask: str, negative: bool
) -> None:
    # So each weight meets the values of its own key, and each head its own units.
    let_by = -(-64 * (design["consumers"] - 1) // design["block_kv"]) if mask != "none" else 0
    assume(not design["CARRY"] or (design["OVERLAP"] and let_by < design["stages"]))
    problem = powers_of_two(batch, (heads_kv * group, heads_kv), seq_q, seq_kv)
    assert_exact(problem, mask, -math.log(2) if negative else math.log(2), **design)


@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
def test_queries_that_see_no_key_give_0_and_minus_infinity(mask: str) -> None:
    assert_exact(powers_of_two(1, (2, 1), 300, 90), mask, math.log(2), programs=2)


def test_keys_in_their_own_order_are_found_out() -> None:
    # The tests above see the order of the keys, because here it is another and they would fail.
    problem = powers_of_two(1, (1, 1), 64, 64)
    q, k, v = problem.units
    straight = v.transpose(2, 3).contiguous().numpy()
    out, _ = v3_emulator.attend(
        q.numpy(), k.numpy(), straight, mask="none", scale=math.log(2), descales=problem.descales.numpy(), programs=1
    )
    expected, _ = reference(*problem.exact, "none", math.log(2))
    assert (torch.from_numpy(out) - expected).abs().max() > 0.1


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_other_weights_are_rounded_and_their_sum_is_not(scale: float) -> None:
    from flashbench.kernels.quantization import quantized

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 64) for heads in (4, 2, 2))
    *units, descales = quantized(q, k, v)
    problem = with_descales(*(x.float() for x in units), descales)
    out, lse = attended(problem, "causal", scale, programs=2, CARRY=True, block_kv=128)
    expected, expected_lse = reference(*problem.exact, "causal", scale)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < 2.0**-4  # a weight's largest relative error
    assert (error > 1e-3) == (scale != 0)  # weights of 1 are held as they are
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_the_least_units_do_not_make_a_hidden_score_no_number() -> None:
    problem = powers_of_two(1, (1, 1), 100, 100)._replace(descales=torch.full((1, 1, 3), 1e-30))
    out, _ = attended(problem, "causal", math.log(2), programs=1)
    assert out.isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_quantised_tensors_reach_448_in_every_head_and_stand_for_what_they_were(magnitude: float) -> None:
    from flashbench.kernels.quantization import quantized

    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 50, 32) * magnitude for heads in (6, 2, 2)]
    tensors[1][1, 0] *= 1000
    *units, descales = quantized(*tensors)
    assert descales.shape == (2, 2, 3)
    assert descales.is_contiguous()
    for unit, exact, stands_for in zip(
        units, tensors, with_descales(*map(torch.Tensor.float, units), descales).exact, strict=True
    ):
        assert unit.dtype == E4M3
        assert (unit.float().unflatten(1, (2, -1)).abs().amax((2, 3, 4)) == 448).all()
        # Half a step of 3 bits behind the leading one, or of 2^-9 units where numbers are small.
        largest = exact.unflatten(1, (2, -1)).abs().amax((2, 3, 4)).repeat_interleave(exact.shape[1] // 2, 1)
        allowed = exact.abs() * 2.0**-4 + largest[:, :, None, None] / 448 * 2.0**-10
        assert ((stands_for - exact).abs() <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("draw", "most"), [(torch.randn, 4e-3), (outliers, 2 * 2.4e-2)])
def test_the_error_of_8_bits_is_that_of_flashattention_3s(
    draw: Callable[..., torch.Tensor], most: float, lazy: bool
) -> None:
    # FlashAttention-3, table 3: 2.4e-2 with a scale a tensor, for entries of which one in a thousand is ten times as large.
    from flashbench.kernels.quantization import quantized

    torch.manual_seed(0)
    q, k, v = (draw(1, 1, 1024, 128) for _ in range(3))
    *units, descales = quantized(q, k, v)
    problem = with_descales(*(x.float() for x in units), descales)
    out, _ = attended(problem, "none", 128**-0.5, programs=2, block_kv=128, LAZY_RESCALE=lazy)
    expected, _ = reference(q, k, v)
    assert rmse(out, expected) < most


def test_a_head_of_zeros_stays_zeros() -> None:
    from flashbench.kernels.quantization import quantized

    q, k, v, descales = quantized(*(torch.zeros(1, 1, 4, 16) for _ in range(3)))
    assert (descales == 1).all()
    assert not any(x.float().any() for x in (q, k, v))


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["dense", "transposed"])
@pytest.mark.parametrize("shape", [(2, 3, 300, 64), (1, 2, 1, 16), (1, 1, 32, 256), (1, 2, 129, 72), (1, 1, 1100, 8)])
def test_v_with_its_keys_last_is_the_same_bytes_elsewhere(
    interpreted: Any, shape: tuple[int, ...], layout: str
) -> None:
    found, expected = interpreted(transposed, shape, layout)
    assert torch.equal(found, expected)


def test_every_key_of_a_group_has_a_place() -> None:
    from flashbench.kernels.flash_v3_keys_last import GROUP, key_at

    assert sorted(key_at(place) for place in range(GROUP)) == list(range(GROUP))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(1, 2, 64, 72).to(E4M3), "k": torch.zeros(1, 2, 64, 72).to(E4M3)}, "multiple of 16"),
        ({"q": torch.zeros(1, 2, 64, 64)}, "share one dtype of e4m3"),
        ({"v_keys_last": torch.zeros(1, 2, 64, 32).to(E4M3)}, "not .1, 2, head_dim, 64."),
        ({"descales": torch.ones(1, 2)}, "descales must be contiguous fp32"),
        ({}, "written for Hopper"),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_reason(changes: dict, words: str) -> None:
    from flashbench.kernels.flash_v3_fp8 import prepare

    whole = dict.fromkeys(("q", "k", "v_keys_last"), torch.zeros(1, 2, 64, 64).to(E4M3)) | {
        "descales": torch.ones(1, 2, 3)
    }
    with pytest.raises(UsageError, match=words):
        prepare(**whole | changes)
