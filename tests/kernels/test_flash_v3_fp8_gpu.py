"""flash-v3 on e4m3 tensors, on a Hopper GPU: exact where e4m3 is, else as near as it can be."""

from __future__ import annotations

import math

import pytest
import torch
from problems import LARGE, SMALL, AttentionProblem, attention, inputs, reference
from v3_fp8_runs import InE4M3, outliers, powers_of_two, rmse, transposed, with_descales


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU (sm_90), and torch sees none"),
]

WEIGHT_ROUNDING = 2.0**-4
KEPT_OF_A_PRODUCT = 2.0**-13
"""What the matrix unit keeps of a sum of 32 8-bit products, as a share of the largest; sums of D / 32 of them lose as often."""
MASKS = ("none", "causal", "window:300")


def on_gpu(problem: InE4M3) -> InE4M3:
    units = tuple(x.to("cuda", torch.float8_e4m3fn) for x in problem.units)
    return InE4M3(units, problem.descales.cuda(), tuple(x.cuda() for x in problem.exact))


def attended(problem: InE4M3, mask: str, scale: float | None, **choice: object) -> tuple[torch.Tensor, torch.Tensor]:
    from flashbench.kernels.flash_v3_fp8 import flash_v3_fp8_forward

    return flash_v3_fp8_forward(*problem.units, problem.descales, mask=mask, scale=scale, with_lse=True, **choice)


def in_e4m3(case: AttentionProblem, seed: int = 0) -> InE4M3:
    from flashbench.kernels.quantization import quantized

    *units, descales = quantized(*inputs(case.but(dtype="bf16"), "cuda", seed))
    return with_descales(*units, descales)


def takes(case: AttentionProblem) -> bool:
    return not (case.problem.head_dim % 16 or case.problem.head_dim_v % 8)


def problems() -> list[AttentionProblem]:
    """The table, each problem once, whatever dtype it asks for."""
    found = [case.but(dtype="bf16") for case in (*SMALL, *LARGE) if takes(case)]
    return list({case.but(name=""): case for case in found}.values())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("negative", [False, True])
def test_weights_that_e4m3_holds_give_exact_outputs(dim: int, mask: str, negative: bool) -> None:
    """Each weight meets the values of its own key, and each head its own units: the order of keys, of bytes in a word, and the scales."""
    problem = on_gpu(powers_of_two(3, (8, 4), 1000, 1500, dim))
    scale = -math.log(2) if negative else math.log(2)
    out, lse = attended(problem, mask, scale)
    expected, expected_lse = reference(*problem.exact, mask, scale)
    # The sums have 14 bits, of values up to 24; the output is bf16.
    assert (out - expected).abs().max() < 24 * (2.0**-8 + 2.0**-11)
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", problems(), ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem) -> None:
    problem = in_e4m3(case)
    out, lse = attended(problem, case.problem.mask, case.scale)
    q, k, v = problem.exact
    expected, expected_lse = reference(q, k, v, case.problem.mask, case.scale)
    scale = case.problem.head_dim**-0.5 if case.scale is None else case.scale
    largest_score = abs(scale) * (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item()
    score_error = KEPT_OF_A_PRODUCT * max(2, case.problem.head_dim // 32) * largest_score
    difference = out.double() - expected
    size = expected.norm().item() or 1.0
    assert out.isfinite().all()
    assert difference.norm().item() <= (WEIGHT_ROUNDING + 2 * score_error) * size
    assert difference.abs().max() <= (2 * WEIGHT_ROUNDING + 2 * score_error) * v.abs().max()
    empty = (lse == -math.inf) & (expected_lse == -math.inf)
    assert torch.where(empty, 0.0, (lse - expected_lse).abs()).max() <= 1e-5 + score_error


@pytest.mark.parametrize("dim", ["64", "128", "256"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "changes",
    [{"stages": 2}, {"block_kv": 64}, {"pingpong": False}, {"carry": False}, {"queue": False}, {"persistent": False}],
)
def test_other_designs_are_right_too(changes: dict, mask: str, dim: str) -> None:
    from dataclasses import replace

    from flashbench.kernels.flash_v3_fp8 import DESIGNS

    problem = on_gpu(powers_of_two(3, (8, 4), 1000, 1500, int(dim)))
    out, _ = attended(problem, mask, math.log(2), design=replace(DESIGNS[int(dim)], **changes))
    expected, _ = reference(*problem.exact, mask, math.log(2))
    assert (out - expected).abs().max() < 24 * (2.0**-8 + 2.0**-11)


@pytest.mark.parametrize("dim", ["64", "128", "256"])
@pytest.mark.parametrize("mask", MASKS)
def test_many_calls_give_the_same_bits(mask: str, dim: str) -> None:
    problem = in_e4m3(attention("bits", "8/2", "1500", dim, batch=4, mask=mask))
    first = attended(problem, mask, None)
    for _ in range(100):
        again = attended(problem, mask, None)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("shape", [(2, 3, 300, 64), (1, 2, 1, 16), (1, 1, 32, 256), (3, 2, 5000, 128), (1, 2, 129, 72)])
@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_v_with_its_keys_last_is_the_same_bytes_elsewhere(shape: tuple[int, ...], layout: str) -> None:
    found, expected = transposed(shape, layout, "cuda")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["flash-v3", "flash-v3:stored-v", "fa3"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_sweep_finds_the_providers_right(name: str, mask: str, dim: int) -> None:
    from flashbench.measure.device import describe
    from flashbench.measure.sampling import Rule
    from flashbench.measure.telemetry import Nvml
    from flashbench.measure.visit import Session, Settings, visit
    from flashbench.providers.table import get
    from flashbench.records import Case, Problem

    problem, device = Problem(2, 8, 4, 1000, 1500, dim, dim, "fp8", mask=mask), describe("cuda")
    reason = get(name).unsupported(problem, device)
    if reason:
        pytest.skip(reason)
    session = Session(device, Settings(Rule(), check_only=True), Nvml(None, "not asked for"))
    row, _ = visit(Case(name, problem), get(name), 0, session)
    assert (row.status, row.reason) == ("checked", None)
    assert name == "fa3" or {"block_q", "block_kv", "registers", "spills", "shared_bytes"} <= row.launch.keys()


@pytest.mark.parametrize("dim", [128, 256])
def test_the_error_on_outliers_is_at_most_twice_that_of_flashattention_3(dim: int) -> None:
    """2.4e-2 with a scale a tensor (arXiv 2407.08608, table 3); bf16 beside it is at least five times as near."""
    from flashbench.kernels.flash_v3_fp8 import flash_v3_fp8_forward
    from flashbench.kernels.flash_v3_launches import flash_v3_forward
    from flashbench.kernels.quantization import quantized

    torch.manual_seed(0)
    q, k, v = (outliers(1, 4, 4096, dim, device="cuda") for _ in range(3))
    expected, _ = reference(q, k, v)
    of_fp8 = rmse(flash_v3_fp8_forward(*quantized(q, k, v)), expected)
    of_bf16 = rmse(flash_v3_forward(*(x.bfloat16() for x in (q, k, v))), expected)
    assert of_fp8 < 2 * 2.4e-2
    assert of_bf16 < of_fp8 / 5
