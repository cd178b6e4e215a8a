"""The byte models: laws that must hold for any problem, and each algorithm's own count."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashbench.errors import UsageError
from flashbench.model import l2, order, tiled
from flashbench.model.flops import useful_flops
from flashbench.model.interval import Cache, Traffic, streamed
from flashbench.model.memory import footprint, inputs_bytes, oom_reason
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import compulsory_bytes
from flashbench.model.traffic import ALGORITHMS, arithmetic_intensity, l2_partitions, traffic
from flashbench.records import Device, Problem

unhurried = settings(deadline=None)
MB, GB = 1e6, 1e9
NAIVE = Schedule(passes=("mask_fill", "view_copies", "grad_product"), scaled_copies=("q",))
H200 = {"l2_bytes": 62_914_560, "l2_partitions": 2, "sm_count": 132}


def problem(**changes):
    return dataclasses.replace(Problem(2, 8, 8, 1024, 1024, 64, 64, "bf16"), **changes)


def square(n, **changes):
    return problem(seq_q=n, seq_kv=n, **changes)


cases = st.sampled_from([(name, mode) for name, counts in ALGORITHMS.items() for mode in counts])
REPLAYED = "tiled-v2"
"""Its estimate is what one order of accesses finds in a cache of whole chunks: laws hold for it nearly, and are not asserted."""
devices = st.fixed_dictionaries(
    {
        "l2_bytes": st.sampled_from([None, 0, 100_000, 4_000_000, 62_914_560]),
        "l2_partitions": st.sampled_from([1, 2]),
        "sm_count": st.sampled_from([None, 1, 7, 108]),
    }
)
schedules = st.builds(
    Schedule,
    block_q=st.sampled_from([1, 16, 128]),
    block_kv=st.sampled_from([1, 16, 128]),
    blocks_per_sm=st.integers(1, 3),
    accumulator_bytes=st.sampled_from([2, 4]),
    two_pass_backward=st.booleans(),
    transposes_v=st.booleans(),
    writes_lse=st.booleans(),
    expands_kv=st.booleans(),
    passes=st.sampled_from(
        [(), ("scale",), ("mask_fill", "view_copies", "grad_product"), ("scale", "mask_add", "dropout", "grad_product")]
    ),
    scaled_copies=st.sampled_from([(), ("q",), ("q", "k")]),
    stored_blocks=st.booleans(),
    score_bytes=st.sampled_from([None, 4]),
)


@st.composite
def problems(draw):
    heads_kv = draw(st.sampled_from([1, 2]))
    return Problem(
        batch=draw(st.integers(1, 3)),
        heads_q=heads_kv * draw(st.sampled_from([1, 2, 4])),
        heads_kv=heads_kv,
        seq_q=draw(st.integers(1, 600)),
        seq_kv=draw(st.integers(1, 600)),
        head_dim=draw(st.sampled_from([64, 192])),
        head_dim_v=draw(st.sampled_from([64, 128])),
        dtype=draw(st.sampled_from(["bf16", "fp32", "fp8"])),
        mask=draw(st.sampled_from(["none", "causal", "window:1", "window:100"])),
        page_size=draw(st.sampled_from([None, 16])),
    )


@unhurried
@given(case=cases, p=problems(), device=devices, s=schedules)
def test_the_estimate_lies_between_everything_once_and_no_reuse(case, p, device, s):
    name, mode = case
    t = traffic(name, dataclasses.replace(p, mode=mode), schedule=s, **device)
    assert 0 < t.low <= t.estimate <= t.high


@unhurried
@given(case=cases, p=problems(), s=schedules, sm_count=st.sampled_from([None, 1, 108]))
def test_a_larger_l2_never_moves_more(case, p, s, sm_count):
    name, mode = case
    p = dataclasses.replace(p, mode=mode)
    assume(name != REPLAYED)
    sizes = (None, 0, 10**5, 10**6, 10**9)
    estimates = [traffic(name, p, l2_bytes=size, sm_count=sm_count, schedule=s).estimate for size in sizes]
    assert estimates == sorted(estimates, reverse=True)


@unhurried
@given(case=cases, p=problems(), device=devices, s=schedules)
def test_reads_and_writes_share_the_estimate_and_neither_is_nothing(case, p, device, s):
    algorithm, mode = case
    moved = traffic(algorithm, dataclasses.replace(p, mode=mode), schedule=s, **device)
    assert 0 < moved.written < moved.estimate
    assert moved.read + moved.written == moved.estimate


def test_plain_attention_reads_as_many_scores_as_it_writes_and_its_backward_five_for_two():
    p = square(8192)
    scores, operand = 2 * 8 * 8192**2 * 2, 2 * 8 * 8192 * 64 * 2
    forward = traffic("materialised", p, l2_bytes=0)
    assert (forward.read, forward.written) == (2 * scores + 3 * operand, 2 * scores + operand)
    backward = traffic("materialised", dataclasses.replace(p, mode="backward"), l2_bytes=0)
    assert (backward.read, backward.written) == (5 * scores + 5 * operand, 2 * scores + 3 * operand)


def test_a_stored_product_of_the_softmax_backward_is_one_more_matrix_written_and_two_more_read():
    p = square(8192, mode="backward")
    scores = 2 * 8 * 8192**2 * 2
    plain = traffic("materialised", p)
    stored = traffic("materialised", p, schedule=Schedule(passes=("grad_product",)))
    assert (stored.read - plain.read, stored.written - plain.written) == (2 * scores, scores)
    forward = dataclasses.replace(p, mode="forward")
    assert traffic("materialised", forward, schedule=Schedule(passes=("grad_product",))) == traffic(
        "materialised", forward
    )


def test_a_fill_through_a_view_copies_the_gradient_five_times_and_writes_zeros_in_backward_alone():
    p = square(8192, mode="backward", mask="causal")
    scores = 2 * 8 * 8192**2 * 2
    plain, viewed = (
        traffic("materialised", p, schedule=Schedule(passes=passes))
        for passes in (("mask_fill",), ("mask_fill", "view_copies"))
    )
    assert (viewed.read - plain.read, viewed.written - plain.written) == (5 * scores, 6 * scores)
    forward = dataclasses.replace(p, mode="forward")
    assert traffic("materialised", forward, schedule=Schedule(passes=("view_copies",))) == traffic(
        "materialised", forward
    )


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_copy_of_q_that_carries_the_scale_or_its_gradient_is_written_and_read(mode):
    p = square(8192, mode=mode)
    q = 2 * 8 * 8192 * 64 * 2
    plain, copied = (traffic("materialised", p, schedule=Schedule(scaled_copies=names)) for names in ((), ("q",)))
    assert (copied.read - plain.read, copied.written - plain.written) == (q, q)


def test_only_q_and_k_carry_the_scale():
    with pytest.raises(UsageError, match="'v' is no input"):
        Schedule(scaled_copies=("v",))


def test_a_fused_kernel_writes_its_output_and_row_statistics_alone():
    assert traffic("tiled-v2", square(8192), l2_bytes=0).written == 2 * 8 * 8192 * (64 * 2 + 4)


@unhurried
@given(case=cases, p=problems(), device=devices, s=schedules, more=st.integers(1, 300))
def test_a_longer_sequence_never_moves_less(case, p, device, s, more):
    name, mode = case
    p = dataclasses.replace(p, mode=mode, seq_kv=p.seq_q)
    longer = dataclasses.replace(p, seq_q=p.seq_q + more, seq_kv=p.seq_q + more)
    short, long = (traffic(name, q, schedule=s, **device) for q in (p, longer))
    assert short.low <= long.low
    assert short.estimate <= long.estimate or name == REPLAYED
    assert short.high <= long.high


@unhurried
@given(case=cases, p=problems(), device=devices, s=schedules)
def test_twice_the_batch_never_moves_less(case, p, device, s):
    name, mode = case
    assume(name != "decode")  # a fuller device needs fewer splits, whose parts may outweigh a very short cache
    p = dataclasses.replace(p, mode=mode)
    one, two = (traffic(name, q, schedule=s, **device) for q in (p, dataclasses.replace(p, batch=2 * p.batch)))
    assert one.low <= two.low
    assert one.estimate <= two.estimate or name == REPLAYED
    assert one.high <= two.high


@unhurried
@given(case=cases, p=problems(), s=schedules)
def test_a_device_without_l2_or_sms_still_has_a_count(case, p, s):
    name, mode = case
    assert traffic(name, dataclasses.replace(p, mode=mode), schedule=s).estimate > 0


@unhurried
@given(count=st.integers(1, 12), slots=st.integers(1, 40), step=st.integers(1, 5), width=st.integers(5, 40))
def test_a_wave_reads_the_union_of_its_blocks_rows(count, slots, step, width):
    blocks = [(max(0, (k + 1) * step - width), (k + 1) * step) for k in range(count)]
    drawn = 0
    for start in range(0, count, slots):
        drawn += len({row for block in blocks[start : start + slots] for row in range(*block)})
    assert streamed(blocks, 1, slots) == drawn


@pytest.mark.parametrize(("slots", "reads"), [(None, 1), (32, 1), (31, 2), (16, 2), (8, 4), (4, 8)])
def test_heads_that_share_keys_read_them_once_for_as_many_heads_as_run_together(slots, reads):
    dense = [(0, 100)] * 8
    assert streamed(dense, 4, slots) == reads * 100


@unhurried
@given(case=cases, p=problems(), s=schedules, size=st.sampled_from([10**5, 10**6, 10**7]))
def test_an_l2_in_parts_never_moves_less(case, p, s, size):
    name, mode = case
    assume(name != REPLAYED)
    p = dataclasses.replace(p, mode=mode)
    one, two = (traffic(name, p, l2_bytes=size, l2_partitions=n, sm_count=7, schedule=s).estimate for n in (1, 2))
    assert one <= two


def test_each_part_of_the_l2_holds_a_copy_of_what_all_sms_read():
    cache = Cache(l2_bytes=100, l2_partitions=2)
    assert cache.again(60, 200, shared=True) == 60 * (1 - 50 / 200)
    assert cache.again(60, 200) == 60 * (1 - 100 / 200)


def test_the_l2_of_an_a100_and_an_h200_has_two_parts_and_others_are_taken_to_have_one():
    def parts(capability, mig=False):
        return l2_partitions(Device("cuda", "GPU", 2**34, capability=capability, mig=mig))

    assert (parts((8, 0)), parts((9, 0))) == (2, 2)
    assert (parts((8, 9)), parts((9, 0), mig=True), l2_partitions(Device("cpu", "CPU", 2**34))) == (1, 1, 1)


def test_a_matrix_spills_whole_when_it_fills_the_l2_and_not_at_all_when_two_fit():
    cache = Cache(l2_bytes=100)
    assert [cache.handed_over(m) for m in (50, 80, 100, 1000)] == [0, 0.75, 1, 1]


def test_causal_and_dense_square_problems_have_the_same_compulsory_bytes():
    # BY-03
    assert compulsory_bytes(square(4096, mask="causal")) == compulsory_bytes(square(4096))


def test_keys_that_no_query_sees_are_not_compulsory():
    # BY-03
    p = problem(seq_q=1, seq_kv=4096, mask="window:128", mode="decode")
    row = 2 * 8 * 64 * 2
    assert compulsory_bytes(p) == 2 * row + 2 * 128 * row


def test_grouped_keys_and_values_count_once_per_kv_head():
    # BY-02
    p = Problem(1, 32, 8, 1, 8192, 128, 128, "bf16", mode="decode")
    assert compulsory_bytes(p) == 2 * 32 * 128 * 2 + 2 * 8 * 8192 * 128 * 2


def test_a_provider_that_repeats_keys_and_values_moves_the_copies_too():
    # BY-02
    p = problem(heads_q=32, heads_kv=8)
    copies = 2 * 2 * 32 * 1024 * 64 * 2
    plain, repeated = (traffic("materialised", p, schedule=Schedule(expands_kv=e)) for e in (False, True))
    assert repeated.estimate - plain.estimate == 2 * copies


def test_each_extra_pass_reads_and_writes_the_scores_once():
    p = square(4096, mask="causal")
    scores = 2 * 8 * 4096**2 * 2
    plain = traffic("materialised", p).estimate
    assert traffic("materialised", p, schedule=Schedule(passes=("scale",))).estimate == plain + 2 * scores
    filled = traffic("materialised", p, schedule=Schedule(passes=("mask_fill",))).estimate
    assert filled == plain + 2 * scores + 2 * 8 * 4096**2  # and each head the mask, one byte a pair


def test_a_problem_without_a_mask_makes_no_mask_pass():
    p = square(4096)
    assert traffic("materialised", p, schedule=Schedule(passes=("mask_fill",))) == traffic("materialised", p)


def test_every_head_reads_the_mask_and_finds_it_in_the_l2_only_where_a_heads_scores_leave_it_there():
    masked = Schedule(passes=("mask_fill",))

    def mask_bytes(n, l2_bytes):
        with_mask = square(n, batch=1, mask="causal")
        without = dataclasses.replace(with_mask, mask="none")
        filled, plain = (traffic("materialised", q, l2_bytes=l2_bytes, schedule=masked) for q in (with_mask, without))
        pass_of_its_own = 2 * 8 * n * n * 2
        return filled.read + filled.written - plain.estimate - pass_of_its_own

    assert mask_bytes(8192, 0) == 8 * 8192**2
    assert mask_bytes(8192, 62_914_560) > 6 * 8192**2
    assert mask_bytes(4096, 10**9) < 2 * 4096**2


def test_scores_kept_in_fp32_move_twice_the_bytes():
    p = square(4096)
    scores = 2 * 8 * 4096**2 * 2
    narrow, wide = (traffic("materialised", p, schedule=Schedule(score_bytes=b)).estimate for b in (None, 4))
    assert wide - narrow == 4 * scores


def test_short_scores_never_leave_the_l2():
    p = square(512)  # 8 MB of scores
    assert traffic("materialised", p, **H200).estimate == compulsory_bytes(p)


def test_four_heads_of_8192_move_four_passes_on_an_h200_less_what_the_l2_keeps():
    """Read by counters on an H200: 2,082 MB in four kernels that wrote or read 537 MB each, two of them for a separate scale."""
    p = Problem(1, 4, 4, 8192, 8192, 64, 64, "fp16")
    counted = (12 + 510 + 537 + 513 + 537 + 520 + 544 + 3) * MB
    model = traffic("materialised", p, schedule=Schedule(passes=("scale",)), **H200)
    assert model.estimate == pytest.approx(counted, rel=0.05)
    assert model.low < counted < model.high


def test_a_fused_kernel_reads_exactly_q_k_and_v():
    """Read by counters on the same card: 12.6 MB."""
    p = Problem(1, 4, 4, 8192, 8192, 64, 64, "fp16")
    model = traffic("tiled-v2", p, **H200)
    output_and_statistics = 4 * 8192 * (64 * 2 + 4)
    assert model.estimate - output_and_statistics == pytest.approx(12.6 * MB, rel=0.005)


def test_without_reuse_a_fused_kernel_moves_what_the_l2_was_seen_to_deliver():
    """Read by counters on the same card: 548 MB of L2 traffic for a kernel with blocks of 128 queries."""
    p = Problem(1, 4, 4, 8192, 8192, 64, 64, "fp16")
    assert traffic("tiled-v2", p, **H200).high == pytest.approx(548 * MB, rel=0.02)


def test_one_wave_reads_keys_and_values_once_however_many_query_blocks_it_has():
    p = Problem(1, 1, 1, 16384, 16384, 128, 128, "bf16")  # 128 blocks on 132 SMs
    t = traffic("tiled-v2", p, l2_bytes=0, sm_count=132)
    assert t.estimate == t.low + 16384 * 4


def test_a_second_wave_reads_keys_and_values_again_unless_the_l2_holds_them():
    p = Problem(1, 1, 1, 32768, 32768, 128, 128, "bf16")  # 256 blocks, two waves; K and V are 16.8 MB
    kv = 2 * 32768 * 128 * 2
    undescribed, small, large = (
        traffic("tiled-v2", p, l2_bytes=size, sm_count=132).estimate for size in (None, kv // 2, 3 * kv)
    )
    assert undescribed - large == kv
    assert small - large == kv


def test_blocks_of_one_sm_that_run_together_share_a_read():
    p = Problem(1, 1, 1, 32768, 32768, 128, 128, "bf16")  # 256 blocks: two on each of 128 SMs
    kv = 2 * 32768 * 128 * 2
    one, two = (
        traffic("tiled-v2", p, l2_bytes=kv // 2, sm_count=128, schedule=Schedule(blocks_per_sm=n)) for n in (1, 2)
    )
    assert one.estimate - two.estimate == kv


def test_the_query_heads_of_a_group_share_a_wave():
    grouped = Problem(1, 4, 1, 4096, 4096, 128, 128, "bf16")  # 4 x 32 blocks, one wave
    t = traffic("tiled-v2", grouped, l2_bytes=0, sm_count=132)
    assert t.estimate == compulsory_bytes(grouped) + 4 * 4096 * 4


def test_the_first_flash_attention_reads_and_writes_o_for_every_key_block():
    p = Problem(1, 1, 1, 1024, 1024, 64, 64, "fp16")
    s = Schedule(block_kv=256, accumulator_bytes=2, writes_lse=False)
    u = 1024 * 64 * 2
    statistics = 3 * 2 * 1024 * 8
    assert traffic("tiled-v1", p, schedule=s).estimate == (2 + 4 + 4 + 3) * u + statistics


def test_larger_key_blocks_move_less_in_the_first_flash_attention():
    p = square(4096)
    moved = [traffic("tiled-v1", p, schedule=Schedule(block_kv=b)).estimate for b in (64, 128, 256, 512)]
    assert moved == sorted(moved, reverse=True)


def test_holding_the_queries_moves_less_than_holding_the_keys():
    p = square(8192)
    v1, v2 = (traffic(name, p, l2_bytes=0, sm_count=132).estimate for name in ("tiled-v1", "tiled-v2"))
    assert v2 < v1 / 10


def test_backward_reads_the_output_and_row_statistics_that_forward_left():
    p = square(1024, mode="backward")
    u, statistics = 2 * 8 * 1024 * 64 * 2, 2 * 8 * 1024 * 4
    assert traffic("tiled-v2", p).low == 8 * u + statistics
    assert traffic("materialised", p).low == 7 * u


def test_an_fp32_accumulator_of_dq_is_zeroed_accumulated_and_converted():
    p = square(1024, mode="backward")
    u, dq, statistics = 2 * 8 * 1024 * 64 * 2, 2 * 8 * 1024 * 64 * 4, 2 * 8 * 1024 * 4
    # without an L2 and in one wave: dO again and delta twice, then zero, read, write, convert
    assert traffic("tiled-v2", p).estimate == 8 * u + statistics + (u + 2 * statistics) + 4 * dq


def test_an_accumulator_of_dq_that_fills_the_l2_passes_through_hbm_between_each_of_its_kernels():
    p = Problem(4, 16, 16, 4096, 4096, 128, 128, "bf16", mode="backward")
    u, dq, statistics = 4 * 16 * 4096 * 128 * 2, 4 * 16 * 4096 * 128 * 4, 4 * 16 * 4096 * 4
    t = traffic("tiled-v2", p, **H200)
    assert t.written == 3 * u + statistics + 2 * dq  # dQ, dK, dV; delta; zeros and sums
    assert t.read == 6 * u + 2 * statistics + 2 * dq  # Q, K, V, O, dO twice; LSE and delta; zeros and sums


def test_an_accumulator_of_dq_that_fits_the_l2_twice_never_leaves_it():
    p = Problem(1, 8, 8, 1024, 1024, 64, 64, "bf16", mode="backward")  # 2 MiB
    t = traffic("tiled-v2", p, **H200)
    assert t.estimate == t.low


def test_a_two_pass_backward_needs_no_accumulator():
    p = square(1024, mode="backward")
    s = Schedule(two_pass_backward=True)
    one, two = footprint("tiled-v2", p), footprint("tiled-v2", p, s)
    assert one.peak - two.peak == 2 * 8 * 1024 * 64 * 4


def test_decoding_reads_the_whole_cache_once():
    p = Problem(16, 32, 8, 1, 8192, 128, 128, "bf16", mode="decode", mask="causal")
    t = traffic("decode", p, **H200)
    assert t.low == pytest.approx(537 * MB, rel=0.001)
    assert t.estimate == pytest.approx(t.low, rel=0.01)
    assert t.high > 3.9 * t.low


def test_a_paged_cache_adds_its_page_table_and_the_lengths():
    p = Problem(4, 8, 8, 1, 1000, 64, 64, "bf16", mode="decode")
    paged = dataclasses.replace(p, page_size=16)
    assert traffic("decode", paged).low - traffic("decode", p).low == 4 * (63 + 1) * 4
    assert inputs_bytes(paged) - inputs_bytes(p) == 4 * (63 + 1) * 4 + 4 * 8 * 8 * 2 * 64 * 2


def test_splits_write_and_read_their_parts_of_the_output():
    p = Problem(1, 1, 1, 1, 100_000, 128, 128, "bf16", mode="decode")
    one, many = (traffic("decode", p, sm_count=n).estimate for n in (None, 132))
    assert many - one == 2 * 132 * (128 * 4 + 4)


def test_fp8_halves_the_inputs_keeps_a_bf16_output_and_adds_scales():
    p = square(1024)
    elements = 2 * 8 * 1024 * 64
    assert compulsory_bytes(dataclasses.replace(p, dtype="fp8")) == 3 * elements + 2 * elements + 3 * 2 * 8 * 4


def test_a_v_that_is_transposed_first_is_written_and_read_once_more_and_held_beside_the_output():
    p, transposed = dataclasses.replace(square(1024), dtype="fp8"), Schedule(transposes_v=True)
    v = 2 * 8 * 1024 * 64
    plain, moved = (traffic("tiled-v2", p, schedule=s) for s in (Schedule(), transposed))
    assert (moved.low - plain.low, moved.estimate - plain.estimate, moved.high - plain.high) == (0, 2 * v, 2 * v)
    assert moved.written - plain.written == v
    assert footprint("tiled-v2", p, transposed).peak - footprint("tiled-v2", p).peak == v
    in_l2 = traffic("tiled-v2", p, l2_bytes=2 * v, sm_count=132, schedule=transposed)
    assert in_l2.estimate == traffic("tiled-v2", p, l2_bytes=2 * v, sm_count=132).estimate
    wide = square(1024)
    assert traffic("tiled-v2", wide, schedule=transposed) == traffic("tiled-v2", wide)


def test_a_product_has_no_backward_pass():
    with pytest.raises(UsageError, match="no backward pass"):
        traffic("gemm-qk", problem(mode="backward"))


def test_an_unknown_algorithm_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'tiled-v2'"):
        traffic("tiled-2", problem())


def test_an_unknown_pass_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'mask_fill'"):
        Schedule(passes=("maskfill",))


def test_the_most_traffic_gives_the_lowest_intensity():
    found = arithmetic_intensity(1000, Traffic(10, 20, 50))
    assert (found.low, found.estimate, found.high) == (20, 50, 100)


@pytest.mark.parametrize(("mask", "per_token"), [("none", 1 / 2), ("causal", 1 / 4)])
def test_compulsory_intensity_is_half_the_sequence_length_whatever_the_head_dimension(mask, per_token):
    for d in (64, 128):
        p = Problem(1, 1, 1, 8192, 8192, d, d, "fp16", mask=mask)
        found = arithmetic_intensity(useful_flops(p), traffic("tiled-v2", p))
        assert found.high == pytest.approx(8192 * per_token, rel=0.001)


@pytest.mark.parametrize(
    ("head_dim", "seq_len", "gib"),
    [(128, 512, 0.56), (128, 1024, 1.06), (128, 4096, 4.06), (64, 512, 1.06), (64, 4096, 8.06)],
)
def test_plain_attention_needs_the_memory_that_was_read_on_an_h200(head_dim, seq_len, gib):
    """torch.cuda.max_memory_allocated net of inputs, 16k tokens, hidden size 2048, bf16, dense."""
    heads = 2048 // head_dim
    p = Problem(16384 // seq_len, heads, heads, seq_len, seq_len, head_dim, head_dim, "bf16")
    assert footprint("materialised", p, NAIVE).peak / 2**30 == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(
    ("head_dim", "seq_len", "mib"),
    [(128, 4096, 4224), (64, 16384, 32896), (128, 16384, 16512), (256, 16384, 8320)],
)
def test_a_mask_filled_in_through_a_view_keeps_the_scores_to_the_end(head_dim, seq_len, mib):
    """Read as above, causal: S, P, the scaled Q and the output."""
    heads = 2048 // head_dim
    p = Problem(16384 // seq_len, heads, heads, seq_len, seq_len, head_dim, head_dim, "bf16", mask="causal")
    assert footprint("materialised", p, NAIVE).peak == mib * 2**20


def test_plain_backward_needs_the_three_matrices_and_dv_that_were_read_on_an_h200():
    """392 MiB: dP, its product with P, and dS of 128 MiB each, and dV."""
    p = Problem(1, 16, 16, 2048, 2048, 128, 128, "bf16", mode="backward")
    assert footprint("materialised", p, NAIVE).peak == (3 * 128 + 8) * 2**20


@pytest.mark.parametrize("seq_len", [512, 4096, 16384])
def test_a_fused_forward_needs_its_output_and_row_statistics_at_every_length(seq_len):
    """65 MiB were read on an H200 at every length (the same problems, head dimension 128)."""
    p = Problem(16384 // seq_len, 16, 16, seq_len, seq_len, 128, 128, "bf16")
    assert footprint("tiled-v2", p).peak == (64 + 1) * 2**20


@unhurried
@given(case=cases, p=problems(), s=schedules)
def test_no_footprint_is_below_what_a_call_is_given_and_returns(case, p, s):
    name, mode = case
    found = footprint(name, dataclasses.replace(p, mode=mode), s)
    assert found.total >= found.inputs + found.peak > found.inputs > 0


def test_a_call_that_cannot_fit_says_what_it_needs_and_what_is_there():
    p = Problem(1, 16, 16, 131072, 131072, 128, 128, "bf16")
    reason = oom_reason(footprint("materialised", p, NAIVE), Device("cuda", "NVIDIA H200", 150_000_000_000))
    assert reason == "predicted: needs 1026.0 GiB (1024.5 GiB of it during the call), NVIDIA H200 has 139.7 GiB"


def test_a_call_that_fits_has_no_reason():
    assert oom_reason(footprint("tiled-v2", problem()), Device("cpu", "CPU", 2**30)) is None


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_a_causal_launch_of_many_sections_is_modelled_by_a_few_of_them(
    mode: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"batch": 4 * 16384 // seq_len, "heads_q": 16, "heads_kv": 16}
    case = square(seq_len, **heads, head_dim=128, head_dim_v=128, mask="causal", mode=mode)
    schedule = Schedule(128, 64, blocks_per_sm=2, backward_blocks_per_sm=2, longest_first=True)

    def read(least_sections: int) -> int:
        monkeypatch.setattr(order, "LEAST_SECTIONS", least_sections)
        for replayed in (tiled._keys_again, tiled._backward_replayed):
            replayed.cache_clear()
        return traffic("tiled-v2", case, **H200, schedule=schedule).read

    assert read(16) == pytest.approx(read(10**6), rel=0.02)


def test_a_dense_launch_of_many_heads_is_modelled_by_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves drift apart, so that heads read later cost less: what the rest costs is told by the second half of what is replayed."""
    case = square(16384, batch=12, heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128)
    schedule = Schedule(128, 64, blocks_per_sm=2)

    def read(waves: int) -> int:
        monkeypatch.setattr(l2, "WAVES", waves)
        tiled._keys_again.cache_clear()
        return traffic("tiled-v2", case, **H200, schedule=schedule).read

    assert read(48) == pytest.approx(read(10**6), rel=0.02)


SMS = 13
"""Their places do not hold whole heads, so that every wave cuts one."""


def read_again(seq_len: int, block_q: int, blocks_per_sm: int, capacity: int) -> float:
    case = Problem(1, 60, 60, seq_len, seq_len, 64, 64, "bf16")
    cache = Cache(l2_bytes=2 * capacity, sm_count=SMS, l2_partitions=2)
    tiled._keys_again.cache_clear()
    again, _ = tiled._keys_again(case, cache, Schedule(block_q, 128, blocks_per_sm), blocks_per_sm, block_q * 256)
    return again


def least_to_stay(seq_len: int, block_q: int, blocks_per_sm: int) -> int:
    """The smallest partition, in KB, of which the model says that heads stay in it without a replay."""
    launch = (seq_len // block_q, seq_len * 256, block_q * 256, SMS * blocks_per_sm)
    return 1000 * next(size for size in range(1, 100_000) if tiled._stays(*launch, 1000 * size))


@pytest.mark.parametrize("blocks_per_sm", [1, 2, 4])
@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("seq_len", [256, 512, 1024, 2048])
def test_where_heads_are_said_to_stay_a_replay_reads_nothing_again(
    seq_len: int, block_q: int, blocks_per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = least_to_stay(seq_len, block_q, blocks_per_sm)
    monkeypatch.setattr(tiled, "_stays", lambda *_: False)
    assert read_again(seq_len, block_q, blocks_per_sm, capacity) == 0


def test_heads_are_said_to_stay_in_little_more_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = least_to_stay(512, 64, 4)
    assert read_again(512, 64, 4, capacity * 2 // 3) > 0


def test_heads_with_blocks_of_all_lengths_are_replayed_however_short_they_are():
    """While the longest block of a head runs, many short ones of others start."""
    case = square(2048, batch=8, heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128, mask="causal")
    found = traffic("tiled-v2", case, **H200, schedule=Schedule(blocks_per_sm=2, walks_down=True))
    assert found.estimate > 1.03 * found.low
