"""The decoding kernel on a GPU: the same problems, longer caches, and those that only a GPU can hold or show."""

from __future__ import annotations

import warnings

import pytest
import torch
from decode_runs import decode_errors, elements_written_beyond_the_end, in_pages, same_bits_twice
from problems import AttentionProblem, attention, inputs, reference
from test_flash_decode import DECODING

from flashbench.kernels.blocks import candidate_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

LONG: tuple[AttentionProblem, ...] = (
    *(
        attention(f"{dtype} d {d} {seq}", "8/2", seq, str(d), batch=2, dtype=dtype, mask="causal")
        for dtype in ("bf16", "fp16", "fp32", "tf32")
        for d in (64, 128, 256)
        for seq in ("1/8192", "3/4097")
    ),
    *(attention(f"d {d}, padded", "8/2", "1/5000", d, dtype="bf16") for d in ("72", "80", "96", "160", "192", "192/128")),
    attention("one sequence, long", "32/8", "1/100000", "128", dtype="bf16"),
    attention("a head to each query head", "32", "1/8192", "128", batch=4, dtype="bf16"),
    attention("one key/value head, 64 rows", "64/1", "1/8192", "128", dtype="bf16"),
    attention("one key/value head, 130 rows", "65/1", "2/8192", "128", dtype="bf16", mask="causal"),
    attention("a window", "32/8", "1/20000", "128", batch=2, dtype="bf16", mask="window:1000"),
    attention("token-major cache", "32/8", "1/8000", "128", batch=2, dtype="bf16", layouts=("transposed",) * 3),
    attention("channels not contiguous", "8/2", "1/3000", "64", dtype="bf16", layouts=("channels-first",) * 3),
)  # fmt: skip


def needs_gib(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory; there are {free:.0f}")


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", DECODING, ids=lambda case: case.name)
def test_small_caches_agree_with_plain_attention(case: AttentionProblem, splits: int) -> None:
    found = decode_errors(case, splits=splits, device="cuda")
    assert found.acceptable, found


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_caches_agree_with_plain_attention(case: AttentionProblem) -> None:
    found = decode_errors(case, device="cuda")
    assert found.acceptable, found


@pytest.mark.parametrize("case", DECODING, ids=lambda case: case.name)
def test_small_paged_caches_agree_with_plain_attention(case: AttentionProblem) -> None:
    for page_size, splits in ((24, 3), (128, 1)):
        found = decode_errors(case, splits=splits, page_size=page_size, device="cuda")
        assert found.acceptable, (page_size, splits, found)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("page_size", [16, 50, 64, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "tf32"])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_long_paged_caches_agree_with_plain_attention(
    head_dim: int, dtype: str, page_size: int, token_major: bool
) -> None:
    case = attention("paged", "8/2", "2/3000", str(head_dim), batch=2, dtype=dtype, mask="causal")
    found = decode_errors(case, page_size=page_size, token_major=token_major, device="cuda")
    assert found.acceptable, found


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", DECODING, ids=lambda case: case.name)
def test_writes_nothing_behind_its_output(case: AttentionProblem, splits: int) -> None:
    assert elements_written_beyond_the_end(case, splits=splits, device="cuda") == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_every_candidate_block_shape_is_right(head_dim: int, dtype: str, page_size: int | None) -> None:
    from flashbench.kernels.inputs import device_limits
    from flashbench.kernels.splits import tallest_shared_bytes

    case = attention("candidates", "8/2", "2/2100", str(head_dim), dtype=dtype, mask="causal")
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    wrong = {}
    for blocks in candidate_blocks(limits.capability, dtype, head_dim, "flash-decode"):
        if tallest_shared_bytes(blocks, limits.capability, dtype, head_dim, head_dim) > limits.shared_bytes:
            continue
        found = decode_errors(case, blocks, page_size=page_size, device="cuda")
        if not found.acceptable:
            wrong[blocks] = found
    assert wrong == {}


def test_sequences_of_different_length_leave_what_is_behind_their_end_alone() -> None:
    """DE-07: NaN behind the end of each, in pages and contiguous; empty splits, and a sequence without keys."""
    from flashbench.kernels.flash_decode import flash_decode

    lengths = [4096, 1000, 64, 1, 0]
    q, k, v = inputs(attention("ragged", "8/2", "1/4096", "128", batch=5, dtype="bf16"), "cuda")
    for sequence, length in enumerate(lengths):
        k[sequence, :, length:] = v[sequence, :, length:] = float("nan")
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    *pages, table, _ = in_pages(k, v, 16)
    for cache in ((k, v, None), (*pages, table)):
        out, lse = flash_decode(q, *cache, on_device, with_lse=True)
        for i, length in enumerate(lengths[:-1]):
            expected, expected_lse = reference(q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length])
            assert (out[i].double() - expected[0]).norm() / expected.norm() < 8e-3
            assert (lse[i].double() - expected_lse[0]).abs().max() < 1e-5
        assert not out[-1].any()
        assert bool((lse[-1] == -torch.inf).all())


def test_offsets_beyond_two_to_the_31_elements_do_not_wrap() -> None:
    """KF-08: 2.2e9 elements of K and of V; the last sequence, beyond the limit, must come out as it does alone."""
    from flashbench.kernels.flash_decode import flash_decode

    needs_gib(20)
    k, v = (torch.randn(33, 16, 32768, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    q = torch.randn(33, 16, 1, 128, dtype=torch.float16, device="cuda")
    out = flash_decode(q, k, v, splits=4)
    assert torch.equal(out[32:], flash_decode(q[32:], k[32:], v[32:], splits=4))
    expected, _ = reference(q[32:, 15:], k[32:, 15:], v[32:, 15:])
    assert (out[32:, 15:].double() - expected).norm() / expected.norm() < 2e-3

    k, v = (cache.view(33 * 512, 16, 64, 128) for cache in (k, v))  # the same memory as pages of 64 keys
    table = torch.arange(33 * 512, dtype=torch.int32, device="cuda").view(33, 512)
    out = flash_decode(q, k, v, table, splits=4)
    assert torch.equal(out[32:], flash_decode(q[32:], k[32 * 512 :], v[32 * 512 :], table[:1], splits=4))


@pytest.mark.parametrize("batch", [10922, 10923])
def test_more_heads_than_65535_are_all_computed(batch: int) -> None:
    from flashbench.kernels.flash_decode import flash_decode

    q, k, v = inputs(attention("KF-09", "6", "1/64", "16", batch=batch), "cuda")
    expected = torch.softmax(q.float() @ k.float().transpose(2, 3) / 4, -1) @ v.float()
    for splits in (1, 2):
        out = flash_decode(q, k, v, splits=splits)
        assert (out.float() - expected).norm() / expected.norm() < 2e-3


def test_thirty_calls_give_the_same_bits() -> None:
    case = attention("repeated", "32/8", "1/8192", "128", dtype="bf16")
    assert same_bits_twice(case, splits=32, device="cuda", times=30)


@pytest.mark.parametrize("splits", [32, 64])
def test_calls_that_follow_one_another_at_once_do_not_read_each_others_parts(splits: int) -> None:
    """The parts of all calls may lie in the same memory; 64 are added up by a second kernel, started before the first has ended."""
    from flashbench.kernels.flash_decode import flash_decode

    q, k, v = inputs(attention("in a row", "32/8", "1/16384", "128", dtype="bf16"), "cuda")
    queries = [q * factor for factor in (1, 2, 3, 4)] * 50
    torch.cuda.synchronize()
    found = [flash_decode(x, k, v, splits=splits) for x in queries]
    apart = []
    for x in queries[:4]:
        torch.cuda.synchronize()
        apart.append(flash_decode(x, k, v, splits=splits))
    assert all(torch.equal(out, apart[i % 4]) for i, out in enumerate(found))


def test_calls_on_several_streams_at_once_count_for_themselves() -> None:
    """Counters that two of them shared would let a program add up parts that are not yet there."""
    from flashbench.kernels.flash_decode import flash_decode

    cases = [inputs(attention("beside", "8/2", f"1/{n}", "128", dtype="bf16"), "cuda") for n in (2048, 4096, 8192)]
    expected = [flash_decode(q, k, v, splits=8) for q, k, v in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in cases]
    for _ in range(300):
        for (q, k, v), stream, own in zip(cases, streams, found, strict=True):
            with torch.cuda.stream(stream):
                own.append(flash_decode(q, k, v, splits=8))
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for own, right in zip(found, expected, strict=True) for out in own)


@pytest.mark.parametrize("page_size", [None, 64])
def test_counters_are_0_again_after_a_launch(page_size: int | None) -> None:
    from flashbench.kernels import flash_decode

    q, k, v = inputs(attention("counted", "32/8", "1/8192", "128", batch=4, dtype="bf16"), "cuda")
    launch = flash_decode.prepare(q, *(in_pages(k, v, page_size) if page_size else (k, v)), splits=16)
    assert launch.counters is not None
    for _ in range(100):
        flash_decode.run(launch)
    assert not launch.counters.any()


def test_a_call_waits_for_nothing_and_can_be_captured_in_a_graph() -> None:
    from flashbench.kernels.flash_decode import flash_decode

    q, k, v = inputs(attention("captured", "32/8", "1/8192", "128", dtype="bf16"), "cuda")
    expected = flash_decode(q, k, v)  # compiled here
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        try:
            torch.cuda.set_sync_debug_mode("error")
            flash_decode(q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_decode(q, k, v)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_the_figures_of_the_launch_are_those_of_the_kernel_that_ran() -> None:
    from flashbench.kernels.flash_decode import launch_figures

    q, k, v = inputs(attention("figures", "32/8", "1/8192", "128", dtype="bf16"), "cuda")
    figures = launch_figures(q, k, v)
    assert figures["splits"] > 1
    assert 0 < figures["registers"] <= 168
    assert figures["spills"] == 0
    assert figures["shared_bytes"] > figures["block_kv"] * 128 * 2
