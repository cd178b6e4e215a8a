"""flash-v3's backward pass on a Hopper GPU: the problems that every backward pass meets, and what only many launches show."""

from __future__ import annotations

import random

import pytest
import torch
from backward_runs import NAMES, GradientErrors, compared, gradient_of_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LAYOUTS, SMALL, AttentionProblem, attention, inputs
from v3_runs import needs_gluon, options_of, problems

from flashbench.errors import UsageError

needs_gluon()


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU (sm_90), and torch sees none"),
]
both = pytest.mark.parametrize("variant", ["", "deterministic"])

RUNS_OF_A_LAUNCH = 1000


def takes(case: AttentionProblem) -> bool:
    p = case.problem
    dims = (p.head_dim, p.head_dim_v)
    return not (any(d % 8 for d in dims) or max(dims) > 128 or "channels-first" in case.layouts)


def passed_through(
    case: AttentionProblem, seed: int = 0, layout: str = "dense", score: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """q, k, v, out, lse of a problem, and a gradient of its output. `score` (for the usual scale) stands in every score."""
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    q, k, v = inputs(case, "cuda", seed)
    if score:
        q[..., 0], k[..., 0] = 1.0, score * case.problem.head_dim**0.5
    out, lse = flash_v3_forward(q, k, v, with_lse=True, **options_of(case))
    return q, k, v, out, lse, gradient_of_output(case, layout, "cuda")


def backward_errors(
    case: AttentionProblem, seed: int = 0, layout: str = "dense", score: float = 0.0, **choice: object
) -> GradientErrors:
    """Errors of a variant's or a design's gradients on a problem against float64."""
    from flashbench.kernels.flash_v3_gradients import flash_v3_backward

    q, k, v, out, lse, d_out = passed_through(case, seed, layout, score)
    gradients = flash_v3_backward(q, k, v, out, lse, d_out, **options_of(case), **choice)
    return compared(case, gradients, q, k, v, d_out)


@both
@pytest.mark.parametrize("case", [case for case in problems() if takes(case)], ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem, variant: str) -> None:
    found = backward_errors(case, variant=variant)
    assert found.acceptable, found


@pytest.mark.parametrize("case", [case for case in problems() if not takes(case)], ids=lambda case: case.name)
def test_what_it_cannot_take_is_refused_with_the_reason(case: AttentionProblem) -> None:
    from flashbench.kernels.flash_v3_gradients import flash_v3

    q, k, v = (x.requires_grad_() for x in inputs(case, "cuda"))
    with pytest.raises(UsageError, match=r"up to 128|multiples of 8|copy engine"):
        flash_v3(q, k, v, **options_of(case))


@both
@pytest.mark.parametrize("case", [case for case in SMALL if takes(case)][::3], ids=lambda case: case.name)
def test_writes_nothing_behind_its_gradients(case: AttentionProblem, variant: str) -> None:
    from flashbench.kernels import flash_v3_gradients as gradients
    from flashbench.kernels.flash_v3_launches import describe

    case = case if case.problem.dtype == "bf16" else case.but(dtype="fp16")
    untouched = -7.0
    q, k, v, out, lse, d_out = passed_through(case)
    backward = gradients.prepare(q, k, v, out, lse, d_out, variant=variant, **options_of(case))
    arguments = list(backward.keys.arguments)
    buffers = []
    # The last three descriptors: the sums of dQ, dK and dV.
    for place, described in ((6, gradients.describe_sums), (7, describe), (8, describe)):
        old = arguments[place]
        if old is None:
            continue
        buffer = torch.full((old.base.numel() + 4096,), untouched, dtype=old.base.dtype, device="cuda")
        buffers.append(buffer)
        start = buffer[: old.base.numel()].view(old.base.shape).zero_()
        box = old.block_shape[3:] if described is gradients.describe_sums else old.block_shape[2:]
        arguments[place] = described(start, *box)
    gradients.run(backward._replace(keys=backward.keys._replace(arguments=tuple(arguments))))
    assert [int((buffer[-4096:] != untouched).sum()) for buffer in buffers] == [0] * len(buffers)


@both
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_the_gradient_of_the_output_may_have_any_strides(layout: str, variant: str) -> None:
    case = attention("KF-05", "4/2", "300/400", "64", mask="causal", dtype="bf16", batch=2)
    found = backward_errors(case, layout=layout, variant=variant)
    assert found.acceptable, found


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("mask", ["none", "causal", "window:200"])
def test_every_design_that_fits_is_right(mask: str, stages: int, halves: int) -> None:
    from flashbench.kernels.flash_v3_gradients import Design, flash_v3_backward

    case = attention("designs", "8/4", "1000/1500", "64", batch=3, dtype="bf16", mask=mask)
    q, k, v, out, lse, d_out = passed_through(case)
    design = Design(halves=halves, stages=stages)
    try:
        gradients = flash_v3_backward(q, k, v, out, lse, d_out, design=design, **options_of(case))
    except UsageError as error:
        assert "shared memory" in str(error)  # noqa: PT017  # two halves in three stages
        return
    found = compared(case, gradients, q, k, v, d_out)
    assert found.acceptable, found


lengths = st.integers(1, 500)
sizes = st.fixed_dictionaries(
    {
        "group": st.integers(1, 4),
        "heads_kv": st.integers(1, 3),
        "batch": st.integers(1, 3),
        "seq": st.one_of(lengths.map(str), st.builds("{}/{}".format, lengths, lengths)),
        "mask": st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 600).map("window:{}".format)),
        "scale": st.one_of(st.none(), st.floats(-0.5, 0.5)),
    }
)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", ["64", "128", "72", "128/64"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=sizes,
    variant=st.sampled_from(["", "deterministic"]),
    layout=st.sampled_from(["dense", "transposed"]),
    seed=st.integers(0, 2**16),
)
def test_problems_of_any_size_agree_with_plain_attention(
    dim: str, dtype: str, drawn: dict, variant: str, layout: str, seed: int
) -> None:
    """200 problems in all."""
    heads = f"{drawn['group'] * drawn['heads_kv']}/{drawn['heads_kv']}"
    rest = {name: drawn[name] for name in ("batch", "mask", "scale")}
    case = attention("drawn", heads, drawn["seq"], dim, dtype=dtype, layouts=(layout,) * 3, **rest)
    found = backward_errors(case, seed, variant=variant)
    assert found.acceptable, (case, found)


@both
@pytest.mark.parametrize("seq", ["128/77", "77/128"])
def test_keys_that_do_not_exist_do_not_overflow_where_scores_are_very_negative(seq: str, variant: str) -> None:
    """KB-02."""
    found = backward_errors(attention("KB-02", "1", seq, dtype="bf16"), score=-500.0, variant=variant)
    assert found.acceptable, found


@both
@pytest.mark.parametrize("mask", ["none", "causal", "window:50"])
def test_a_scale_of_0_gives_every_visible_key_the_same_weight(mask: str, variant: str) -> None:
    found = backward_errors(attention("scale 0", "2", "200/300", mask=mask, dtype="bf16", scale=0.0), variant=variant)
    assert found.acceptable, found


@both
@pytest.mark.parametrize("seq", ["704", "640"])
def test_a_length_of_half_a_block_has_finite_gradients_under_a_mask(seq: str, variant: str) -> None:
    """KB-06."""
    found = backward_errors(attention("KB-06", "2", seq, mask="causal", dtype="bf16"), score=-120.0, variant=variant)
    assert found.acceptable, found


@pytest.mark.parametrize("dim", ["64", "128"])
def test_the_deterministic_variant_gives_the_same_bits_every_time(dim: str) -> None:
    """KB-05: 30 calls on the fault's problem, and five on a larger one with groups."""
    from flashbench.kernels.flash_v3_gradients import flash_v3_backward

    for case, calls in (
        (attention("KB-05", "4", "512", dim, dtype="bf16", batch=2), 30),
        (attention("KB-05", "8/2", "3000", dim, dtype="bf16", mask="causal"), 5),
    ):
        tensors = passed_through(case)
        first = flash_v3_backward(*tensors, variant="deterministic", mask=case.problem.mask)
        for _ in range(calls - 1):
            again = flash_v3_backward(*tensors, variant="deterministic", mask=case.problem.mask)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_usual_variant_moves_dq_by_no_more_than_rounding_and_nothing_else() -> None:
    """KB-05: dK and dV are sums of one program each; only dQ depends on the order of the additions."""
    from flashbench.kernels.flash_v3_gradients import flash_v3_backward

    case = attention("KB-05", "8/2", "3000", "128", dtype="bf16", mask="causal")
    tensors = passed_through(case)
    dq, dk, dv = flash_v3_backward(*tensors, mask="causal")
    for _ in range(4):
        again = flash_v3_backward(*tensors, mask="causal")
        assert torch.equal(dk, again[1])
        assert torch.equal(dv, again[2])
        assert (dq.float() - again[0].float()).norm() < 1e-3 * dq.float().norm()


def test_a_thousand_launches_of_mixed_shapes_neither_hang_nor_differ() -> None:
    """Without waiting in between, so that launches follow one another as they do in use; dK and dV are held against their first result."""
    from flashbench.kernels.flash_v3_gradients import flash_v3_backward

    cases = [
        attention("mixed", heads, seq, dim, dtype="bf16", mask=mask, batch=batch)
        for heads, seq, dim, batch in (("8/2", "1000", "64", 3), ("16", "2048", "128", 2), ("4", "700/1300", "128", 2), ("2", "1", "128", 1), ("8", "129/64", "64", 9))
        for mask in ("none", "causal", "window:200")
    ]  # fmt: skip
    tensors = [passed_through(case) for case in cases]
    first = [flash_v3_backward(*given, **options_of(case)) for case, given in zip(cases, tensors, strict=True)]
    order = random.Random(0).choices(range(len(cases)), k=RUNS_OF_A_LAUNCH)
    differs = torch.zeros(len(cases), dtype=torch.int64, device="cuda")
    for i in order:
        dq, dk, dv = flash_v3_backward(*tensors[i], **options_of(cases[i]))
        before = first[i]
        differs[i] += (dk != before[1]).any() | (dv != before[2]).any()
        differs[i] += (dq.float() - before[0].float()).norm() > 1e-3 * before[0].float().norm()
    assert differs.tolist() == [0] * len(cases)


def test_offsets_beyond_two_to_the_31_elements_do_not_wrap() -> None:
    """KF-08: 2.2e9 elements a tensor; the last batch, beyond the limit, must get the gradients that it gets alone."""
    from flashbench.kernels.flash_v3_gradients import flash_v3_backward
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    if torch.cuda.mem_get_info()[0] / 2**30 < 50:
        pytest.skip("needs 50 GiB of free GPU memory")
    shape = (33, 16, 32768, 128)
    q, k, v, d_out = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4))
    out, lse = flash_v3_forward(q, k, v, mask="window:128", with_lse=True)
    gradients = flash_v3_backward(q, k, v, out, lse, d_out, mask="window:128")
    alone = flash_v3_backward(*(x[32:] for x in (q, k, v, out, lse, d_out)), mask="window:128")
    for name, got, wanted in zip(NAMES, gradients, alone, strict=True):
        tolerance = 1e-3 if name == "dq" else 0
        assert 0 < wanted.float().norm() < torch.inf, name
        assert (got[32:].float() - wanted.float()).norm() <= tolerance * wanted.float().norm(), name


def test_more_heads_than_65535_all_get_their_gradients() -> None:
    """KF-09."""
    from flashbench.kernels.flash_v3_gradients import flash_v3

    q, k, v = (x.requires_grad_() for x in inputs(attention("KF-09", "6", "32", "16", batch=10923), "cuda"))
    d_out = torch.randn_like(q)
    gradients = torch.autograd.grad(flash_v3(q, k, v), (q, k, v), d_out)
    # Written out: autograd's thread may be without a CUDA context when cuBLAS is first called there, which torch warns of.
    query, key, value, d_o = (x.detach().float() for x in (q, k, v, d_out))
    weight = torch.softmax(query @ key.mT / 4, -1)
    d_p = d_o @ value.mT
    d_s = weight * (d_p - (weight * d_p).sum(-1, keepdim=True)) / 4
    for name, got, wanted in zip(NAMES, gradients, (d_s @ key, d_s.mT @ query, weight.mT @ d_o), strict=True):
        assert (got.float() - wanted.float()).norm() < 3e-3 * wanted.float().norm(), name


@both
def test_autograd_gives_the_same_gradients(variant: str) -> None:
    from flashbench.kernels.flash_v3_gradients import flash_v3

    case = attention("autograd", "8/2", "700/900", "128/64", dtype="bf16", mask="causal", batch=2)
    q, k, v = (x.requires_grad_() for x in inputs(case, "cuda"))
    d_out = gradient_of_output(case, "dense", "cuda")
    gradients = torch.autograd.grad(flash_v3(q, k, v, backward=variant, **options_of(case)), (q, k, v), d_out)
    found = compared(case, gradients, q.detach(), k.detach(), v.detach(), d_out)
    assert found.acceptable, found


@both
def test_the_figures_of_the_launch_are_those_of_the_kernels_that_ran(variant: str) -> None:
    from flashbench.kernels.flash_v3_gradients import launch_figures, prepare

    case = attention("figures", "4", "1024", "128", dtype="bf16")
    figures = launch_figures(prepare(*passed_through(case), variant=variant))
    assert (figures["block_q"], figures["block_kv"], figures["num_warps"]) == (64, 128, 12)
    assert figures["shared_bytes"] > 128 * 1024
    assert ("queries" in figures) == (variant == "deterministic")
