"""The backward kernels on a GPU: the same problems, larger ones, and those that only a GPU can hold or show."""

from __future__ import annotations

import pytest
import torch
from backward_runs import NAMES, autograd_errors, backward_errors, compared, elements_written_beyond_the_end
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LARGE, LAYOUTS, SMALL, AttentionProblem, attention, inputs

from flashbench.kernels.blocks import candidate_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]
both = pytest.mark.parametrize("variant", ["two-pass", "one-pass"])


def needs_gib(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory; there are {free:.0f}")


def passed_through(case: AttentionProblem) -> tuple[torch.Tensor, ...]:
    """q, k, v, out, lse of a problem, and a gradient of its output."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(case, "cuda")
    out, lse = flash_v2_forward(q, k, v, mask=case.problem.mask, with_lse=True)
    return q, k, v, out, lse, torch.randn_like(out)


@both
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem, variant: str) -> None:
    found = backward_errors(case, variant, device="cuda")
    assert found.acceptable, found


@both
@pytest.mark.parametrize("case", SMALL[::3], ids=lambda case: case.name)
def test_writes_nothing_behind_its_gradients(case: AttentionProblem, variant: str) -> None:
    assert elements_written_beyond_the_end(case, variant, device="cuda") == 0


@both
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_gradient_of_the_output_may_have_any_strides(dtype: str, layout: str, variant: str) -> None:
    case = attention("KF-05", "4/2", "300/400", "64", mask="causal", dtype=dtype, batch=2)
    found = backward_errors(case, variant, device="cuda", layout=layout)
    assert found.acceptable, found


@pytest.mark.parametrize("kernel", ["keys", "queries", "one-pass"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:200"])
def test_every_candidate_block_shape_is_right(kernel: str, head_dim: int, dtype: str, mask: str) -> None:
    """The other pass of two runs in the first shape of its own list."""
    from flashbench.kernels.flash_v2_gradients import KERNELS, SHARED_BYTES
    from flashbench.kernels.inputs import device_limits

    case = attention("candidates", "4/2", "512/768", str(head_dim), dtype=dtype, mask=mask)
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    variant = "one-pass" if kernel == "one-pass" else "two-pass"
    lists = []
    for name in KERNELS[variant]:
        shapes = candidate_blocks(limits.capability, dtype, head_dim, name)
        fit = [
            x
            for x in shapes
            if SHARED_BYTES[name](x, limits.capability, dtype, head_dim, head_dim) <= limits.shared_bytes
        ]
        lists.append(fit if name.endswith(kernel) else fit[:1])
    wrong = {}
    for first in lists[0]:
        for blocks in [(first, second) for second in lists[1]] if variant == "two-pass" else [(first,)]:
            found = backward_errors(case, variant, blocks, device="cuda")
            if not found.acceptable:
                wrong[blocks] = found
    assert wrong == {}


COMPILED = (
    ("bf16", "64", "dense"), ("bf16", "128", "transposed"), ("bf16", "256", "dense"), ("bf16", "192/128", "packed"), ("bf16", "72", "sliced"),
    ("fp16", "64", "packed"), ("fp16", "128", "channels-first"), ("tf32", "64", "dense"), ("fp32", "128", "transposed"), ("fp32", "40", "sliced"),
)  # fmt: skip
"""What the kernels are compiled anew for, a few of each: within one the sizes vary, which costs no compilation."""
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


@pytest.mark.parametrize("kind", COMPILED, ids=" ".join)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=sizes, variant=st.sampled_from(["two-pass", "one-pass"]), layout=st.sampled_from([*LAYOUTS, "expanded"]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_problems_of_any_size_agree_with_plain_attention(
    kind: tuple[str, str, str], drawn: dict, variant: str, layout: str, seed: int
) -> None:
    """250 problems in all."""
    dtype, dim, inputs_layout = kind
    heads = f"{drawn['group'] * drawn['heads_kv']}/{drawn['heads_kv']}"
    rest = {name: drawn[name] for name in ("batch", "mask", "scale")}
    case = attention("drawn", heads, drawn["seq"], dim, dtype=dtype, layouts=(inputs_layout,) * 3, **rest)
    found = backward_errors(case, variant, device="cuda", seed=seed, layout=layout)
    assert found.acceptable, (case, found)


@both
@pytest.mark.parametrize("seq", ["128/77", "77/128"])
def test_padded_columns_do_not_overflow_where_scores_are_very_negative(seq: str, variant: str) -> None:
    """KB-02."""
    found = backward_errors(attention("KB-02", "1", seq, dtype="fp32"), variant, device="cuda", score=-500.0)
    assert found.acceptable, found


@both
@pytest.mark.parametrize("seq", ["704", "640"])
def test_a_length_of_half_a_block_has_finite_gradients_under_a_mask(seq: str, variant: str) -> None:
    """KB-06."""
    case = attention("KB-06", "2", seq, mask="causal", dtype="bf16")
    found = backward_errors(case, variant, device="cuda", score=-120.0)
    assert found.acceptable, found


def test_two_passes_give_the_same_bits_every_time() -> None:
    """KB-05: 30 calls on the fault's problem, and one on a larger one with groups."""
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    for case, calls in (
        (attention("KB-05", "4", "512", dtype="bf16", batch=2), 30),
        (attention("KB-05", "8/2", "3000", "128", dtype="bf16", mask="causal"), 5),
    ):
        tensors = passed_through(case)
        first = flash_v2_backward(*tensors, mask=case.problem.mask)
        for _ in range(calls - 1):
            again = flash_v2_backward(*tensors, mask=case.problem.mask)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_one_pass_moves_dq_by_no_more_than_rounding_and_nothing_else() -> None:
    """KB-05: dK and dV are sums of one program each; only dQ depends on the order of the additions."""
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    case = attention("KB-05", "8/2", "3000", "128", dtype="fp32", mask="causal")
    tensors = passed_through(case)
    dq, dk, dv = flash_v2_backward(*tensors, mask="causal", variant="one-pass")
    for _ in range(4):
        again = flash_v2_backward(*tensors, mask="causal", variant="one-pass")
        assert torch.equal(dk, again[1])
        assert torch.equal(dv, again[2])
        assert (dq - again[0]).norm() < 1e-6 * dq.norm()


@both
def test_offsets_beyond_two_to_the_31_elements_do_not_wrap(variant: str) -> None:
    """KF-08: 2.2e9 elements a tensor; the last batch, beyond the limit, must get the gradients that it gets alone."""
    from flashbench.kernels.flash_v2 import flash_v2_forward
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    needs_gib(50)
    shape = (33, 16, 32768, 128)
    q, k, v, d_out = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4))
    out, lse = flash_v2_forward(q, k, v, mask="window:128", with_lse=True)
    gradients = flash_v2_backward(q, k, v, out, lse, d_out, mask="window:128", variant=variant)
    one = [x[32:] for x in (q, k, v, out, lse, d_out)]
    alone = flash_v2_backward(*one, mask="window:128", variant=variant)
    for name, got, wanted in zip(NAMES, gradients, alone, strict=True):
        tolerance = 1e-3 if (variant, name) == ("one-pass", "dq") else 0
        assert 0 < wanted.float().norm() < torch.inf, name
        assert (got[32:].float() - wanted.float()).norm() <= tolerance * wanted.float().norm(), name


@both
@pytest.mark.parametrize("batch", [10922, 10923])
def test_more_heads_than_65535_all_get_their_gradients(batch: int, variant: str) -> None:
    from flashbench.kernels.flash_v2_autograd import flash_v2

    q, k, v = (x.requires_grad_() for x in inputs(attention("KF-09", "6", "32", "16", batch=batch), "cuda"))
    out = torch.softmax(q.float() @ k.float().mT / 4, -1) @ v.float()
    d_out = torch.randn_like(out).half()
    expected = torch.autograd.grad(out, (q, k, v), d_out.float())
    gradients = torch.autograd.grad(flash_v2(q, k, v, backward=variant), (q, k, v), d_out)
    for name, got, wanted in zip(NAMES, gradients, expected, strict=True):
        assert (got.float() - wanted.float()).norm() < 3e-3 * wanted.float().norm(), name


@both
def test_exact_and_tf32_products_differ_as_their_names_say(variant: str) -> None:
    """KF-15: exact fp32 is right to 1e-5, and tf32 is not."""
    from flashbench.kernels.flash_v2 import flash_v2_forward
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    case = attention("KF-15", "4", "512", "128", dtype="fp32", mask="causal")
    q, k, v = inputs(case, "cuda")
    d_out = torch.randn_like(q)
    errors = {}
    for precision in ("ieee", "tf32"):
        options = {"mask": "causal", "precision": precision}
        out, lse = flash_v2_forward(q, k, v, with_lse=True, **options)
        gradients = flash_v2_backward(q, k, v, out, lse, d_out, variant=variant, **options)
        errors[precision] = max(compared(case, gradients, q, k, v, d_out).norm.values())
    assert errors["ieee"] < 1 < 30 < errors["tf32"]


@both
def test_autograd_gives_the_same_gradients(variant: str) -> None:
    case = attention("autograd", "8/2", "700/900", "128/64", dtype="bf16", mask="causal", batch=2)
    found = autograd_errors(case, variant, device="cuda")
    assert found.acceptable, found


@both
def test_the_figures_of_the_launch_are_those_of_the_kernels_that_ran(variant: str) -> None:
    from flashbench.kernels.flash_v2_gradients import launch_figures, prepare

    case = attention("figures", "4", "1024", "128", dtype="bf16")
    figures = launch_figures(prepare(*passed_through(case), variant=variant))
    passes = [figures[name] for name in (("keys", "queries") if variant == "two-pass" else ("one_pass",))]
    assert figures["block_kv"] == passes[0]["block_kv"]
    assert figures["block_q"] == passes[-1]["block_q"]
    for one in passes:
        assert 0 < one["registers"] <= 255
        assert one["spills"] < 64
        assert one["shared_bytes"] > one["block_kv"] * 128 * 2
