"""The published figures that the argument for flash attention rests on, from the tool's own models.

Sources: Dao et al. 2022 (FlashAttention), Dao 2023 (FlashAttention-2), NVIDIA's data sheets.
"""

import dataclasses

import pytest

from flashbench.hardware.catalogue import get
from flashbench.model.flops import backward_flops, forward_flops, softmax_ops, useful_flops
from flashbench.model.memory import footprint, kv_cache_bytes
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import tensors
from flashbench.model.traffic import arithmetic_intensity, theoretical_accesses, traffic
from flashbench.records import Problem

N, D = 8192, 64
ONE_HEAD = Problem(1, 1, 1, N, N, D, D, "fp16")
GPT2 = Problem(64, 16, 16, 1024, 1024, 64, 64, "fp16", mode="forward_backward")
GPT2_MASKED = dataclasses.replace(GPT2, mask="causal")


def test_one_score_matrix_of_8192_tokens_has_67_million_elements_and_134_megabytes():
    assert N * N == 67_108_864
    assert tensors(ONE_HEAD).scores / 1e6 == pytest.approx(134.2, abs=0.05)


def test_the_two_products_of_one_head_are_17_18_gflop():
    assert forward_flops(ONE_HEAD) == 4 * N**2 * D
    assert forward_flops(ONE_HEAD) / 1e9 == pytest.approx(17.18, abs=0.005)


def test_with_the_softmax_they_are_17_5_gflop():
    assert (forward_flops(ONE_HEAD) + softmax_ops(ONE_HEAD)) / 1e9 == pytest.approx(17.5, abs=0.05)


def test_the_materialised_form_moves_541_megabytes():
    assert traffic("materialised", ONE_HEAD).estimate / 1e6 == pytest.approx(541, abs=0.5)


def test_the_materialised_form_moves_541_megabytes_on_an_a100_too_whose_l2_holds_no_score_matrix():
    a100 = get("a100-pcie-80gb")
    moved = traffic("materialised", ONE_HEAD, l2_bytes=a100.l2_bytes, sm_count=a100.sm_count)
    assert moved.estimate / 1e6 == pytest.approx(541, abs=0.5)


def test_the_materialised_form_has_an_intensity_of_32_flop_per_byte():
    flops = forward_flops(ONE_HEAD) + softmax_ops(ONE_HEAD)
    assert arithmetic_intensity(flops, traffic("materialised", ONE_HEAD)).estimate == pytest.approx(32, abs=0.5)


def qk_intensity(head_dim, seq_len=N):
    p = dataclasses.replace(ONE_HEAD, seq_q=seq_len, seq_kv=seq_len, head_dim=head_dim, head_dim_v=head_dim)
    return arithmetic_intensity(useful_flops(p, "gemm-qk"), traffic("gemm-qk", p)).estimate


def test_qk_alone_has_an_intensity_of_63_at_head_dimension_64_and_124_at_128():
    assert qk_intensity(64) == pytest.approx(63, abs=0.5)
    assert qk_intensity(128) == pytest.approx(124, abs=0.5)


def test_the_intensity_of_qk_tends_to_the_head_dimension_as_the_sequence_grows():
    assert qk_intensity(64, 2**20) == pytest.approx(64, rel=0.001)


def test_qk_alone_is_left_of_both_ridges_at_either_head_dimension():
    assert qk_intensity(128) < get("a100-pcie-80gb").ridge("fp16") < get("h100-sxm5-80gb").ridge("fp16")


def test_an_intensity_of_63_allows_39_percent_of_the_a100s_peak():
    a100 = get("a100-pcie-80gb")
    assert a100.attainable_tflops("fp16", 63) / a100.peak_tflops("fp16") == pytest.approx(0.39, abs=0.005)


def test_the_flash_form_moves_no_score_only_its_operands_output_and_row_statistics():
    u = N * D * 2
    assert traffic("tiled-v2", ONE_HEAD).estimate == 4 * u + 4 * N


def test_backward_is_8n2d_with_stored_matrices_and_10n2d_with_recomputed_ones():
    assert backward_flops(ONE_HEAD, recomputed=False) == 8 * N**2 * D
    assert backward_flops(ONE_HEAD) == 10 * N**2 * D


def test_recomputation_costs_a_quarter_of_the_backward_pass_and_a_sixth_of_the_whole():
    forward, stored, recomputed = forward_flops(GPT2), backward_flops(GPT2, recomputed=False), backward_flops(GPT2)
    assert recomputed / stored == 1.25
    assert (forward + recomputed) / (forward + stored) == pytest.approx(7 / 6)


def test_gpt2_medium_counts_824_and_962_gflop_whose_ratio_is_1_167():
    stored, recomputed = (forward_flops(GPT2) + backward_flops(GPT2, recomputed=r) for r in (False, True))
    assert stored / 1e9 == pytest.approx(824.6, abs=0.1)
    assert recomputed / 1e9 == pytest.approx(962.1, abs=0.1)
    assert recomputed / stored == pytest.approx(1.167, abs=0.001)


def kept(algorithm, seq_len):
    p = dataclasses.replace(ONE_HEAD, seq_q=seq_len, seq_kv=seq_len, mode="backward")
    return footprint(algorithm, p).kept


def test_flash_keeps_the_output_and_row_statistics_for_backward():
    assert kept("tiled-v2", N) == N * D * 2 + N * 4


def test_what_is_kept_for_backward_grows_linearly_in_flash_and_quadratically_when_stored():
    assert kept("tiled-v2", 2 * N) == 2 * kept("tiled-v2", N)
    assert kept("materialised", 2 * N) / kept("materialised", N) == pytest.approx(4, rel=0.02)


def gpt2_plain():
    """Plain attention without and with a mask and dropout in passes of their own, on the paper's A100, whose L2 holds the mask."""
    l2_bytes = get("a100-sxm4-40gb").l2_bytes
    full = Schedule(passes=("mask_fill", "dropout"))
    return (
        traffic("materialised", GPT2, l2_bytes=l2_bytes).estimate,
        traffic("materialised", GPT2_MASKED, l2_bytes=l2_bytes, schedule=full).estimate,
    )


def test_gpt2_mediums_plain_attention_moves_25_gigabytes_without_mask_and_dropout_and_up_to_45_with_both():
    bare, full = gpt2_plain()
    assert bare / 1e9 == pytest.approx(25.2, abs=0.1)
    assert full / 1e9 == pytest.approx(44.6, abs=0.1)


def test_the_papers_40_gigabytes_of_plain_attention_lie_between_the_baselines_without_and_with_its_extra_passes():
    bare, full = gpt2_plain()
    assert bare < 40.3e9 < full


def test_the_papers_4_4_gigabytes_of_flash_lie_between_the_compulsory_1_6_and_6_with_fp32_temporaries():
    moved = traffic("tiled-v1", GPT2, schedule=Schedule(block_kv=256, accumulator_bytes=4))
    assert moved.low / 1e9 == pytest.approx(1.6, abs=0.05)
    assert moved.high / 1e9 == pytest.approx(6, abs=0.2)
    assert moved.low < 4.4e9 < moved.high


def test_the_ridge_of_the_a100_pcie_with_80_gigabytes_is_161_and_of_the_h100_sxm5_is_295():
    assert get("a100-pcie-80gb").ridge("bf16") == pytest.approx(161, abs=0.5)
    assert get("h100-sxm5-80gb").ridge("bf16") == pytest.approx(295, abs=0.5)


@pytest.mark.parametrize(
    ("gpu", "ridge"),
    [
        ("a100-sxm4-80gb", 153),
        ("a100-pcie-40gb", 201),
        ("a100-sxm4-40gb", 201),
        ("h100-pcie-80gb", 378),
        ("h100-nvl-94gb", 212),
        ("h200-sxm-141gb", 206),
    ],
)
def test_other_variants_of_the_same_chips_have_other_ridges(gpu, ridge):
    assert get(gpu).ridge("bf16") == pytest.approx(ridge, abs=0.5)


def test_the_a100_has_20_megabytes_on_chip_at_19_terabytes_a_second():
    a100 = get("a100-pcie-80gb")
    assert a100.l1_kb_per_sm * a100.sm_count == 192 * 108
    assert a100.on_chip_mb == pytest.approx(20, abs=0.5)
    assert a100.smem_tbps == pytest.approx(19.5, abs=0.05)


def test_the_a100s_hbm_is_40_to_80_gigabytes_at_1_5_to_2_terabytes_a_second():
    cards = [get(f"a100-{name}") for name in ("pcie-40gb", "sxm4-40gb", "pcie-80gb", "sxm4-80gb")]
    assert {c.memory_gb for c in cards} == {40, 80}
    assert min(c.hbm_gbps for c in cards) == 1555
    assert max(c.hbm_gbps for c in cards) == 2039


@pytest.mark.parametrize(("head_dim", "times_fewer"), [(128, 6), (64, 24)])
def test_flash_makes_m_over_d_squared_times_fewer_accesses_to_the_scores(head_dim, times_fewer):
    on_chip = get("a100-pcie-80gb").l1_kb_per_sm * 1024 / 2
    assert on_chip == 98_304
    standard, flash = theoretical_accesses(2**20, head_dim, on_chip)
    assert standard / flash == pytest.approx(times_fewer, rel=0.001)


def test_the_kv_cache_of_an_8_billion_parameter_model_takes_128_kib_a_token():
    token = Problem(1, 32, 8, 1, 1, 128, 128, "fp16", mode="decode")
    assert kv_cache_bytes(token, layers=32) == 131_072


def test_the_kv_cache_of_100000_tokens_takes_13_1_gigabytes():
    p = Problem(1, 32, 8, 1, 100_000, 128, 128, "fp16", mode="decode")
    assert kv_cache_bytes(p, layers=32) / 1e9 == pytest.approx(13.1, abs=0.05)
    assert kv_cache_bytes(p, layers=32) / 2**30 == pytest.approx(12.2, abs=0.05)


@pytest.mark.parametrize("algorithm", ["decode", "tiled-v2", "materialised"])
def test_decoding_is_left_of_the_ridge_whatever_the_algorithm(algorithm):
    p = Problem(16, 32, 8, 1, 8192, 128, 128, "fp16", mode="decode")
    found = arithmetic_intensity(useful_flops(p), traffic(algorithm, p))
    assert found.high <= 4
    assert found.high < get("a100-pcie-80gb").ridge("fp16") / 40
