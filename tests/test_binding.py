"""Which ceiling holds a point."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.hardware.catalogue import get
from flashbench.hardware.ceilings import Ceiling, spec_ceilings
from flashbench.model.binding import bind, occupancy
from flashbench.model.flops import useful_flops
from flashbench.model.interval import Traffic
from flashbench.model.traffic import traffic
from flashbench.records import Problem

H100 = spec_ceilings(get("h100-sxm5-80gb"))
LONG = Problem(4, 16, 16, 4096, 4096, 128, 128, "bf16")


def bound(problem, time_ms, algorithm="tiled-v2", ceilings=H100, **more):
    moved = traffic(algorithm, problem, l2_bytes=50 * 2**20, sm_count=132)
    return bind(time_ms, problem, moved, useful_flops(problem), ceilings, **more)


def shares(binding):
    return {s.name: s.share for s in binding.shares}


def test_a_fast_fused_kernel_is_held_by_the_tensor_cores():
    found = bound(LONG, useful_flops(LONG) / 700e12 * 1000)
    assert found.name == "compute"
    assert found.sentence.startswith("held by tensor-core: 71% of 989.4 TFLOP/s (spec) (")
    assert shares(found)["exp"] == pytest.approx(shares(found)["compute"] / 2, rel=0.01)


def test_a_head_dimension_of_64_puts_the_exponential_unit_level_with_the_tensor_cores():
    found = shares(bound(dataclasses.replace(LONG, heads_q=32, heads_kv=32, head_dim=64, head_dim_v=64), 1.0))
    assert found["exp"] == pytest.approx(found["compute"], rel=0.001)


def test_plain_attention_is_held_by_hbm():
    found = bound(LONG, 3.0, "materialised")
    assert found.name == "hbm"
    assert found.sentence.startswith("held by HBM: ")


def test_decoding_is_held_by_hbm():
    p = Problem(16, 32, 8, 1, 8192, 128, 128, "bf16", mode="decode")
    assert bound(p, 0.2, "decode").name == "hbm"


def test_the_l2_is_held_to_what_is_read_without_reuse():
    measured = Ceiling("l2", None, "read", 5600, "GB/s", "measured")
    found = bound(LONG, 0.3, ceilings=(measured,))
    assert shares(found)["l2"] == pytest.approx(traffic("tiled-v2", LONG).high / 5600e9 / 0.3e-3)


def test_a_tiny_problem_is_held_by_its_launch():
    p = Problem(1, 4, 4, 256, 256, 64, 64, "bf16")
    found = bound(p, 0.007, launch_ms=0.005)
    assert found.name == "launch"
    assert found.sentence.startswith("the launch takes 71% of the time")


def test_a_few_blocks_leave_most_of_the_sms_without_work():
    p = Problem(1, 1, 1, 4096, 4096, 128, 128, "bf16")
    found = bound(p, 0.2, sm_count=132, blocks=32)
    assert found.name == "occupancy"
    assert found.sentence.startswith("76% of the SM time has no block to run")


def test_the_waves_stand_beside_their_share():
    found = bound(LONG, 1.0, sm_count=132, blocks=2048)
    assert "empty SMs 3% [2,048 blocks in 16 wave(s) of 132]" in found.sentence


@pytest.mark.parametrize(("blocks", "filled"), [(132, 1), (133, 133 / 264), (66, 0.5), (264, 1)])
def test_a_last_wave_that_is_not_full_leaves_slots_empty(blocks, filled):
    assert occupancy(blocks, 132) == filled


def test_far_from_every_ceiling_the_sentence_says_so_and_names_the_nearest():
    found = bound(LONG, 10.0)
    assert found.sentence.startswith("no ceiling is near; the nearest is tensor-core at 6%")
    assert found.sentence.endswith("or work that the models do not count")


def test_above_a_measured_ceiling_it_is_the_ceiling_that_wants_measuring_again():
    measured = Ceiling("compute", "bf16", "gemm", 600, "TFLOP/s", "measured", "isolated")
    found = bound(LONG, useful_flops(LONG) / 700e12 * 1000, ceilings=(*H100, measured), regime="isolated")
    assert found.sentence.startswith(
        "above its tensor-core ceiling: 117% of 600 TFLOP/s (measured); measure the ceiling again"
    )


def test_a_working_set_inside_the_l2_explains_a_bandwidth_above_the_data_sheets():
    found = bind(0.003, LONG, Traffic(16_000_000, 16_000_000, 16_000_000), 1, H100, exps=0)
    assert found.name == "hbm"
    assert "above its HBM ceiling: 159%" in found.sentence
    assert "may lie in the L2" in found.sentence


def test_a_dtype_without_a_unit_has_no_compute_share():
    p = dataclasses.replace(LONG, dtype="fp8")
    found = bound(p, 1.0, ceilings=spec_ceilings(get("a100-pcie-80gb")))
    assert "compute" not in shares(found)
    assert "hbm" in shares(found)


def test_fp32_is_held_to_its_own_cores_not_to_the_tensor_cores():
    p = dataclasses.replace(LONG, dtype="fp32")
    found = bound(p, useful_flops(p) / 50e12 * 1000)
    assert found.sentence.startswith("held by fp32-core: 75% of 66.9 TFLOP/s (spec)")


def test_a_matrix_product_alone_has_no_exponentials():
    assert "exp" not in shares(bound(LONG, 1.0, "gemm-qk", exps=0))


def test_a_device_without_ceilings_gets_no_verdict():
    found = bind(1.0, LONG, traffic("tiled-v2", LONG), useful_flops(LONG), ())
    assert (found.name, found.shares) == (None, ())
    assert "measure its ceilings first" in found.sentence


@settings(deadline=None)
@given(time_ms=st.floats(1e-3, 1e3), blocks=st.integers(1, 5000))
def test_shares_stand_in_falling_order_and_the_first_gives_the_name(time_ms, blocks):
    found = bound(LONG, time_ms, sm_count=132, blocks=blocks, launch_ms=0.005)
    values = [s.share for s in found.shares]
    assert values == sorted(values, reverse=True)
    assert found.name == found.shares[0].name
