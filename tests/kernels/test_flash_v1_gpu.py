"""The first FlashAttention's loop order on a GPU: what waits in memory between key blocks must be read as it was written."""

from __future__ import annotations

import pytest
import torch
from problems import LARGE, SMALL, AttentionProblem, attention, inputs
from v1_runs import difference_between_loop_orders, elements_written_astray, v1_errors

from flashbench.kernels.blocks import candidate_blocks
from flashbench.kernels.flash_v1 import flash_v1_forward, launch_figures, shared_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem) -> None:
    found = v1_errors(case, device="cuda")
    assert found.acceptable, found


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_writes_nothing_astray_and_reads_no_row_that_it_has_not_written(case: AttentionProblem) -> None:
    assert elements_written_astray(case, device="cuda") == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:200"])
def test_every_candidate_block_shape_is_right(head_dim: int, dtype: str, mask: str) -> None:
    from flashbench.kernels.inputs import device_limits

    case = attention("candidates", "4/2", "512/768", str(head_dim), dtype=dtype, mask=mask)
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    fitting = [
        blocks
        for blocks in candidate_blocks(limits.capability, dtype, head_dim, kernel="flash-v1")
        if shared_bytes(blocks, limits.capability, dtype, head_dim, head_dim) <= limits.shared_bytes
    ]
    found = {blocks: v1_errors(case, blocks, device="cuda") for blocks in fitting}
    assert fitting
    assert {blocks: errors for blocks, errors in found.items() if not errors.acceptable} == {}


@pytest.mark.parametrize("mask", ["none", "causal", "window:1000"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_loop_orders_agree_over_many_key_blocks(head_dim: int, mask: str) -> None:
    case = attention("both", "4", "4096", str(head_dim), dtype="bf16", mask=mask)
    assert difference_between_loop_orders(case, None, "cuda") < 2 * 2.0**-8


def test_a_launch_that_fills_the_device_gives_the_same_bits_twice() -> None:
    """A row that is read before it was written, or fetched ahead of its store, would differ from call to call: 300 programs at a time."""
    q, k, v = inputs(attention("twice", "30", "1500", "128", dtype="bf16", mask="causal", batch=10), "cuda")
    first = flash_v1_forward(q, k, v, mask="causal")
    assert all(torch.equal(first, flash_v1_forward(q, k, v, mask="causal")) for _ in range(3))


@pytest.mark.parametrize("batch", [10922, 10923])
def test_more_heads_than_65535_are_all_computed(batch: int) -> None:
    q, k, v = inputs(attention("KF-09", "6", "32", "16", batch=batch), "cuda")
    expected = torch.softmax(q.float() @ k.float().transpose(2, 3) / 4, -1) @ v.float()
    out = flash_v1_forward(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert (out.float() - expected).norm() / expected.norm() < 2e-3


def test_offsets_beyond_two_to_the_31_elements_do_not_wrap() -> None:
    """KF-08: 2.2e9 elements a tensor; the last batch, beyond the limit, must come out as it does alone."""
    if torch.cuda.mem_get_info()[0] < 36 * 2**30:
        pytest.skip("needs 36 GiB of free GPU memory")
    q, k, v = (torch.randn(33, 16, 32768, 128, dtype=torch.float16, device="cuda") for _ in range(3))
    out, alone = (flash_v1_forward(*some, mask="window:128") for some in ((q, k, v), (q[32:], k[32:], v[32:])))
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out[32:], alone)


def test_the_figures_of_the_launch_are_those_of_the_kernel_that_ran() -> None:
    q, k, v = inputs(attention("figures", "4", "1024", "64", dtype="bf16"), "cuda")
    figures = launch_figures(q, k, v)
    assert 0 < figures["registers"] <= 255
    assert figures["shared_bytes"] > figures["block_q"] * 64 * 2
