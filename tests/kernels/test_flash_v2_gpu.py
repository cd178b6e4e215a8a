"""The forward kernel on a GPU: the same problems, larger ones, and those that only a GPU can hold or show."""

from __future__ import annotations

import pytest
import torch
from forward_runs import elements_written_beyond_the_end, forward_errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LARGE, SMALL, AttentionProblem, attention, inputs, reference

from flashbench.kernels.blocks import candidate_blocks, shared_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]


def needs_gib(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory; there are {free:.0f}")


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem) -> None:
    found = forward_errors(case, device="cuda")
    assert found.acceptable, found


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_writes_nothing_behind_its_output(case: AttentionProblem) -> None:
    assert elements_written_beyond_the_end(case, device="cuda") == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:200"])
def test_every_candidate_block_shape_is_right(head_dim: int, dtype: str, mask: str) -> None:
    from flashbench.kernels.inputs import device_limits

    case = attention("candidates", "4/2", "512/768", str(head_dim), dtype=dtype, mask=mask)
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    wrong = {}
    for blocks in candidate_blocks(limits.capability, dtype, head_dim):
        if shared_bytes(blocks, limits.capability, dtype, head_dim, head_dim) > limits.shared_bytes:
            continue
        found = forward_errors(case, blocks, device="cuda")
        if not found.acceptable:
            wrong[blocks] = found
    assert wrong == {}


@pytest.mark.parametrize("seq_kv", [64, 500, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_infinite_value_is_infinite_in_the_output_and_not_nan(head_dim: int, seq_kv: int) -> None:
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q = torch.zeros(2, 2, 100, head_dim, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(2, 2, seq_kv, head_dim, dtype=torch.bfloat16, device="cuda")
    v = torch.ones_like(k)
    v[:, :, 3, 5] = v[:, :, -1, 7] = torch.inf
    out = flash_v2_forward(q, k, v)
    infinite = torch.zeros(head_dim, dtype=torch.bool, device="cuda")
    infinite[[5, 7]] = True
    assert bool((out.isposinf() == infinite).all())
    assert bool((out[..., ~infinite] == 1).all())


VARIANTS = (
    ("bf16", "64", "dense"), ("bf16", "128", "transposed"), ("bf16", "256", "dense"), ("bf16", "192/128", "packed"), ("bf16", "72", "sliced"),
    ("fp16", "64", "packed"), ("fp16", "128", "channels-first"), ("tf32", "64", "dense"), ("fp32", "128", "transposed"), ("fp32", "40", "sliced"),
)  # fmt: skip
"""What the kernel is compiled anew for, a few of each: within one the sizes vary, which costs no compilation."""
lengths = st.integers(1, 600)
sizes = st.fixed_dictionaries(
    {
        "group": st.integers(1, 4),
        "heads_kv": st.integers(1, 3),
        "batch": st.integers(1, 3),
        "seq": st.one_of(lengths.map(str), st.builds("{}/{}".format, lengths, lengths)),
        "mask": st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 700).map("window:{}".format)),
        "scale": st.one_of(st.none(), st.floats(0.01, 1)),
    }
)


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=sizes, seed=st.integers(0, 2**16))
def test_problems_of_any_size_agree_with_plain_attention(variant: tuple[str, str, str], drawn: dict, seed: int) -> None:
    """250 problems in all."""
    dtype, dim, layout = variant
    heads = f"{drawn['group'] * drawn['heads_kv']}/{drawn['heads_kv']}"
    rest = {name: drawn[name] for name in ("batch", "mask", "scale")}
    case = attention("drawn", heads, drawn["seq"], dim, dtype=dtype, layouts=(layout,) * 3, **rest)
    found = forward_errors(case, device="cuda", seed=seed)
    assert found.acceptable, (case, found)


def test_offsets_beyond_two_to_the_31_elements_do_not_wrap() -> None:
    """KF-08: 2.2e9 elements a tensor; the last batch, beyond the limit, must come out as it does alone, and right."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    needs_gib(24)
    shape = (33, 16, 32768, 128)
    q, k, v = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(3))
    out = flash_v2_forward(q, k, v, mask="window:128")
    alone = flash_v2_forward(q[32:], k[32:], v[32:], mask="window:128")
    assert torch.equal(out[32:], alone)
    expected, _ = reference(q[32:, 15:, -300:], k[32:, 15:, -500:], v[32:, 15:, -500:], "window:128")
    assert (out[32:, 15:, -300:].double() - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("batch", [10922, 10923])
def test_more_heads_than_65535_are_all_computed(batch: int) -> None:
    """KF-09: two of the grid's axes end at 65,535, and a launch beyond may do nothing and say nothing."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(attention("KF-09", "6", "32", "16", batch=batch), "cuda")
    out = flash_v2_forward(q, k, v)
    expected = torch.softmax(q.float() @ k.float().transpose(2, 3) / 4, -1) @ v.float()
    assert (out.float() - expected).norm() / expected.norm() < 2e-3


def test_exact_and_tf32_products_differ_as_their_names_say() -> None:
    """KF-15: exact fp32 is right to 1e-6 and tf32 is not, so that neither stands for the other."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(attention("KF-15", "4", "512", "128", dtype="fp32", mask="causal"), "cuda")
    expected, _ = reference(q, k, v, "causal")

    def error(precision: str) -> float:
        out = flash_v2_forward(q, k, v, mask="causal", precision=precision)
        return ((out.double() - expected).norm() / expected.norm()).item()

    assert error("ieee") < 3e-6
    assert 3e-5 < error("tf32") < 3e-3


def test_two_calls_give_the_same_bits() -> None:
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(attention("twice", "8/2", "1000", "128", dtype="bf16", mask="causal", batch=2), "cuda")
    assert torch.equal(flash_v2_forward(q, k, v, mask="causal"), flash_v2_forward(q, k, v, mask="causal"))


def test_the_figures_of_the_launch_are_those_of_the_kernel_that_ran() -> None:
    from flashbench.kernels.flash_v2 import launch_figures

    q, k, v = inputs(attention("figures", "4", "1024", "128", dtype="bf16"), "cuda")
    figures = launch_figures(q, k, v)
    assert 0 < figures["registers"] <= 255
    assert figures["spills"] == 0
    assert figures["shared_bytes"] > figures["block_q"] * 128 * 2
