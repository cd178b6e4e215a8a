"""flash-v3 on a Hopper GPU: the problems that every kernel meets, its variants, and what only many launches show."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LARGE, SMALL, AttentionProblem, attention, inputs, reference
from v3_runs import elements_written_beyond_the_end, forward_errors, options_of, problems, reason_against

from flashbench.errors import UsageError


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU (sm_90), and torch sees none"),
]

RUNS_OF_A_LAUNCH = 1000


def takes(case: AttentionProblem) -> bool:
    p = case.problem
    return not (p.head_dim % 8 or p.head_dim_v % 8 or "channels-first" in case.layouts)


@pytest.mark.parametrize("case", [case for case in problems() if takes(case)], ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem) -> None:
    found = forward_errors(case)
    assert found.acceptable, found


@pytest.mark.parametrize("case", [case for case in problems() if not takes(case)], ids=lambda case: case.name)
def test_what_the_copy_engine_cannot_read_is_refused_with_the_reason(case: AttentionProblem) -> None:
    reason = reason_against(case)
    assert reason is not None
    assert "multiples of 8" in reason or "copy engine" in reason


@pytest.mark.parametrize("case", [case for case in SMALL if takes(case)], ids=lambda case: case.name)
def test_writes_nothing_behind_its_output(case: AttentionProblem) -> None:
    case = case if case.problem.dtype == "bf16" else case.but(dtype="fp16")
    assert elements_written_beyond_the_end(case) == 0


VARIANTS = (
    "bare", "overlap", "persistent", "dealt", "queue", "early-wait", "one-tile", "no-overlap", "no-pingpong", "named-release",
)  # fmt: skip


@pytest.mark.parametrize("head_dim", ["64", "128", "256", "192/128"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:300"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_right(variant: str, mask: str, head_dim: str) -> None:
    # 18 x 8 tiles of 128 queries: more than an H200 has multiprocessors, so that a persistent program takes a second one.
    case = attention("variant", "8/4", "1000/1500", head_dim, batch=3, dtype="bf16", mask=mask)
    found = forward_errors(case, variant=variant)
    assert found.acceptable, found


@pytest.mark.parametrize("mask", ["none", "causal", "window:300"])
def test_two_consumers_are_right_where_there_are_three(mask: str) -> None:
    case = attention("two", "8/4", "1000/1500", "64", batch=3, dtype="bf16", mask=mask)
    found = forward_errors(case, variant="two-consumers")
    assert found.acceptable, found


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize(
    "changes", [{}, {"pingpong": False}, {"named_release": True}, {"pingpong": False, "named_release": True}]
)
def test_rings_of_any_depth_neither_hang_nor_err(changes: dict, block_kv: int, stages: int) -> None:
    from flashbench.kernels.flash_v3_designs import Design

    case = attention("stages", "4/2", "700/900", "64", batch=8, dtype="fp16", mask="causal")
    found = forward_errors(case, design=Design(block_kv=block_kv, stages=stages, **changes))
    assert found.acceptable, found


lengths = st.integers(1, 1200)
sizes = st.fixed_dictionaries(
    {
        "group": st.integers(1, 4),
        "heads_kv": st.integers(1, 3),
        "batch": st.integers(1, 4),
        "seq": st.one_of(lengths.map(str), st.builds("{}/{}".format, lengths, lengths)),
        "mask": st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 1300).map("window:{}".format)),
        "scale": st.one_of(st.none(), st.floats(0.01, 1)),
    }
)


@pytest.mark.parametrize("layout", ["dense", "transposed"])
@pytest.mark.parametrize("dim", ["64", "128", "256", "72"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=sizes, seed=st.integers(0, 2**16))
def test_problems_of_any_size_agree_with_plain_attention(dim: str, layout: str, drawn: dict, seed: int) -> None:
    """200 problems in all."""
    heads = f"{drawn['group'] * drawn['heads_kv']}/{drawn['heads_kv']}"
    rest = {name: drawn[name] for name in ("batch", "mask", "scale")}
    case = attention("drawn", heads, drawn["seq"], dim, dtype="bf16", layouts=(layout,) * 3, **rest)
    found = forward_errors(case, seed=seed)
    assert found.acceptable, (case, found)


@pytest.mark.parametrize("case", [case for case in LARGE if takes(case)], ids=lambda case: case.name)
def test_two_calls_give_the_same_bits(case: AttentionProblem) -> None:
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    case = case if case.problem.dtype == "bf16" else case.but(dtype="fp16")
    q, k, v = inputs(case, "cuda")
    first = flash_v3_forward(q, k, v, with_lse=True, **options_of(case))
    second = flash_v3_forward(q, k, v, with_lse=True, **options_of(case))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("variant", ["", "no-pingpong", "named-release"])
def test_a_thousand_launches_of_mixed_shapes_neither_hang_nor_differ(variant: str) -> None:
    """Without waiting in between, so that launches follow one another as they do in use; each is held against its first result."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    cases = [
        attention("mixed", heads, seq, dim, dtype="bf16", mask=mask, batch=batch)
        for heads, seq, dim, batch in (("8/2", "1000", "64", 3), ("16", "2048", "128", 2), ("4", "700/1300", "256", 2), ("2", "1", "128", 1), ("8", "129/64", "128", 9))
        for mask in ("none", "causal", "window:200")
    ]  # fmt: skip
    tensors = [inputs(case, "cuda") for case in cases]
    first = [
        flash_v3_forward(*qkv, variant=variant, **options_of(case)) for case, qkv in zip(cases, tensors, strict=True)
    ]
    order = random.Random(0).choices(range(len(cases)), k=RUNS_OF_A_LAUNCH)
    differs = torch.zeros(len(cases), dtype=torch.int64, device="cuda")
    for i in order:
        out = flash_v3_forward(*tensors[i], variant=variant, **options_of(cases[i]))
        differs[i] += (out != first[i]).any()
    assert differs.tolist() == [0] * len(cases)


def test_a_device_that_does_other_work_meanwhile_gets_the_same_bits() -> None:
    """Two streams at once: programs of both share multiprocessors, and every wait becomes longer."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    q, k, v = inputs(attention("beside", "8", "2048", "128", dtype="bf16", mask="causal", batch=2), "cuda")
    alone = flash_v3_forward(q, k, v, mask="causal")
    a, b = torch.randn(2, 4096, 4096, device="cuda", dtype=torch.bfloat16).unbind()
    torch.cuda.synchronize()
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(50):
            a @ b
    outs = [flash_v3_forward(q, k, v, mask="causal") for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone) for out in outs)


def test_offsets_beyond_two_to_the_31_elements_do_not_wrap() -> None:
    """KF-08: 2.2e9 elements a tensor; the last batch, beyond the limit, must come out as it does alone, and right."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    if torch.cuda.mem_get_info()[0] / 2**30 < 24:
        pytest.skip("needs 24 GiB of free GPU memory")
    shape = (33, 16, 32768, 128)
    q, k, v = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(3))
    out = flash_v3_forward(q, k, v, mask="window:128")
    alone = flash_v3_forward(q[32:], k[32:], v[32:], mask="window:128")
    assert torch.equal(out[32:], alone)
    expected, _ = reference(q[32:, 15:, -300:], k[32:, 15:, -500:], v[32:, 15:, -500:], "window:128")
    assert (out[32:, 15:, -300:].double() - expected).norm() / expected.norm() < 2e-3


def test_more_heads_than_65535_are_all_computed() -> None:
    """KF-09: two of the grid's axes end at 65,535; this kernel's list of tiles is on the first."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    q, k, v = inputs(attention("KF-09", "6", "32", "16", batch=10923), "cuda")
    expected = torch.softmax(q.float() @ k.float().transpose(2, 3) / 4, -1) @ v.float()
    for variant in ("", "one-tile"):
        out = flash_v3_forward(q, k, v, variant=variant)
        assert (out.float() - expected).norm() / expected.norm() < 2e-3


def test_repeated_memory_is_refused() -> None:
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    q = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(2, 1, 64, 64, dtype=torch.bfloat16, device="cuda").expand(2, 4, 64, 64)
    with pytest.raises(UsageError, match="no repeated memory"):
        flash_v3_forward(q, k, k)


def test_the_figures_of_the_launch_are_those_of_the_kernel_that_ran() -> None:
    from flashbench.kernels.flash_v3_launches import launch_figures

    q, k, v = inputs(attention("figures", "4", "1024", "128", dtype="bf16"), "cuda")
    figures = launch_figures(q, k, v)
    assert (figures["block_q"], figures["block_kv"], figures["num_warps"]) == (128, 128, 12)
    assert figures["spills"] == 0
    assert figures["shared_bytes"] > 192 * 1024
