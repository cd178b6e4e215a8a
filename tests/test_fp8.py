"""Problems in fp8: inputs with their scales, what they are held to, and a kernel of one's own that runs them from end to end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashbench.config.axes import expand
from flashbench.config.load import load
from flashbench.measure.check import Outcome, check_results
from flashbench.measure.reference import LIFT, error_norm, make_reference, stood_for
from flashbench.measure.workload import Inputs, make_inputs, make_operation, same_inputs
from flashbench.providers.spec import Bound
from flashbench.providers.table import PROVIDERS, get
from flashbench.records import Device, Problem
from flashbench.run.plan import make_plan

CPU = Device("cpu", "test", 1 << 34)
H200 = Device("cuda", "NVIDIA H200", 150_000_000_000, capability=(9, 0), versions={"triton": "3.6.0"})
E4M3 = torch.float8_e4m3fn
ROOT = Path(__file__).parents[1]
USUAL = Problem(2, 4, 2, 300, 300, 64, 64, "fp8")


def inputs_of(problem: Problem, seed: int = 0) -> Inputs:
    return make_inputs(problem, seed, torch.device("cpu"))


def attend(inputs: Inputs, block: int = 128) -> torch.Tensor:
    """Dense attention as a kernel does it: block by block beside a running maximum, weights in e4m3, V in its units."""
    assert inputs.descales is not None
    group = inputs.q.shape[1] // inputs.k.shape[1]
    of_q, of_k, of_v = (x.repeat_interleave(group, 1)[:, :, None, None] for x in inputs.descales.unbind(-1))
    k, v = (x.float().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    scores = inputs.q.float() @ k.transpose(2, 3) * (of_q * of_k * inputs.q.shape[3] ** -0.5)
    top = torch.full((*scores.shape[:3], 1), -torch.inf)
    total = out = torch.zeros(1)
    for s, v_block in zip(scores.split(block, 3), v.split(block, 2), strict=True):
        before, top = top, torch.maximum(top, s.amax(3, keepdim=True))
        weights, rescale = (s - top).exp() * LIFT, (before - top).exp()
        total = total * rescale + weights.sum(3, keepdim=True)
        out = out * rescale + weights.to(E4M3).float() @ v_block
    return (out / total * of_v).bfloat16()


def checked(problem: Problem, out: torch.Tensor) -> Outcome:
    return check_results(problem, make_reference(problem, inputs_of(problem), CPU), {"out": out})


def test_inputs_are_e4m3_with_a_scale_for_each_head_and_the_same_for_every_provider() -> None:
    inputs = inputs_of(USUAL)
    *tensors, descales = inputs.arguments
    assert [(x.dtype, x.is_contiguous(), x.shape[1]) for x in tensors] == [(E4M3, True, heads) for heads in (4, 2, 2)]
    assert (descales.shape, descales.dtype, descales.is_contiguous()) == ((2, 2, 3), torch.float32, True)
    assert same_inputs(USUAL, 0, inputs)
    assert not same_inputs(USUAL, 1, inputs)


@pytest.mark.parametrize("which", range(4))
def test_a_provider_that_writes_to_its_inputs_is_found_out(which: int) -> None:
    inputs = inputs_of(USUAL)
    tensor = inputs.arguments[which]
    tensor.view(torch.uint8).flatten()[-1] += 1
    assert not same_inputs(USUAL, 0, inputs)


def test_inputs_stand_for_standard_normal_numbers_times_a_power_of_two_and_scores_are_standard() -> None:
    problem = dataclasses.replace(USUAL, batch=3, heads_kv=4)
    q, k, v = stood_for(inputs_of(problem), torch.float64)
    factors = v.std((2, 3))
    assert torch.allclose(factors, factors.log2().round().exp2(), rtol=0.05)
    assert sorted(factors.log2().round().unique().tolist()) == [-1, 0, 1]
    assert (factors.log2().round().diff(dim=0) != 0).all()  # a kernel that takes another sequence's scale shows, too
    assert (factors.log2().round().diff(dim=1) != 0).all()
    assert torch.allclose((q @ k.transpose(2, 3)).std((2, 3)) * 64**-0.5, torch.ones(3, 4).double(), rtol=0.05)


def test_the_reference_is_attention_in_float64_of_what_the_tensors_stand_for() -> None:
    inputs = inputs_of(USUAL)
    assert inputs.descales is not None
    of_q, of_k, of_v = (inputs.descales[:, :, which, None, None].double().repeat_interleave(2, 1) for which in range(3))
    q, k, v = inputs.q.double(), *(x.double().repeat_interleave(2, 1) for x in (inputs.k, inputs.v))
    expected = torch.softmax((q * of_q) @ (k * of_k).transpose(2, 3) / 8, -1) @ (v * of_v)
    reference = make_reference(USUAL, inputs, CPU)
    assert error_norm(reference.true["out"], expected) < 1e-14
    # Each weight is off by up to 2^-4, and in the mean by 2.6 %.
    assert 0.02 < reference.naive_error_norm["out"] < 0.03


@pytest.mark.parametrize("block", [64, 224])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 67), (7, 300), (300, 33), (64, 4096)])
def test_a_kernel_with_weights_in_e4m3_is_right(shape: tuple[int, int], block: int) -> None:
    problem = dataclasses.replace(USUAL, seq_q=shape[0], seq_kv=shape[1])
    outcome = checked(problem, attend(inputs_of(problem), block))
    assert outcome.problem is None


def in_place(key: Callable[[int], int]) -> Callable[[Inputs], Inputs]:
    def permuted(inputs: Inputs) -> Inputs:
        v = inputs.v.view(torch.uint8)[:, :, [key(place) for place in range(inputs.v.shape[2])]]
        return dataclasses.replace(inputs, v=v.view(E4M3))

    return permuted


def scales(change: Callable[[torch.Tensor], None]) -> Callable[[Inputs], Inputs]:
    def changed(inputs: Inputs) -> Inputs:
        assert inputs.descales is not None
        descales = inputs.descales.clone()
        change(descales)
        return dataclasses.replace(inputs, descales=descales)

    return changed


def of_the_neighbour(which: int) -> Callable[[torch.Tensor], None]:
    def change(descales: torch.Tensor) -> None:
        descales[:, :, which] = descales[:, :, which].flip(1)

    return change


def of_the_first_sequence(descales: torch.Tensor) -> None:
    descales[:] = descales[:1].clone()


def missing_in_one_head(descales: torch.Tensor) -> None:
    descales[1, 1, 2] = 1.0


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(in_place(lambda place: place ^ 1 if place < 298 else place), id="keys change places in pairs"),
        pytest.param(in_place(lambda place: place ^ 1 if place < 8 else place), id="the first eight keys do"),
        pytest.param(scales(missing_in_one_head), id="no scale for V in one head"),
        pytest.param(scales(of_the_first_sequence), id="scales of the first sequence"),
        *(pytest.param(scales(of_the_neighbour(i)), id=f"{name}'s scale of another head") for i, name in enumerate("QKV")),
    ],
)  # fmt: skip
def test_a_kernel_with_wrong_keys_or_scales_is_incorrect(mistake: Callable[[Inputs], Inputs]) -> None:
    assert "wrong" in (checked(USUAL, attend(mistake(inputs_of(USUAL)))).problem or "")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out * 1.06, "is wrong"),
        (lambda out: torch.cat([out[:, :, :1] * 3, out[:, :, 1:]], 2), "is wrong"),
        (lambda out: out.float(), "has dtype float32, not bfloat16"),
        (lambda out: out.to(E4M3), "not bfloat16"),
    ],
)
def test_a_wrong_row_a_wrong_factor_and_a_wrong_dtype_are_incorrect(spoil: Callable, words: str) -> None:
    assert words in (checked(USUAL, spoil(attend(inputs_of(USUAL)))).problem or "")


def test_inputs_that_a_provider_stores_otherwise_are_stored_once() -> None:
    stored = []

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stored.append(v.transpose(2, 3).contiguous())
        return q, k, stored[-1], descales

    inputs = inputs_of(USUAL)
    operation = make_operation(USUAL, Bound(lambda _q, _k, v, _descales: v, store=store), inputs)
    results = [operation.run(), operation.run(), operation.results()["out"]]
    assert len(stored) == 1
    assert all(result is stored[0] for result in results)


@pytest.mark.parametrize("mode", ["backward", "forward_backward", "decode"])
@pytest.mark.parametrize("name", ["flash-v3", "flash-v3:stored-v", "fa3"])
def test_fp8_in_another_mode_than_forward_is_refused_in_words(name: str, mode: str) -> None:
    reason = get(name).unsupported(dataclasses.replace(USUAL, mode=mode), H200)
    assert reason == f"fp8 is measured in mode forward only, not {mode}"


def test_whoever_has_no_fp8_kernel_says_so() -> None:
    for name, provider in PROVIDERS.items():
        reason = provider.unsupported(USUAL, H200)
        if name not in ("flash-v3", "flash-v3:stored-v", "fa3"):
            assert reason, name


def test_the_shipped_sweep_is_planned_whole_on_a_hopper_card() -> None:
    cases = [case for case in expand(load(ROOT / "configs" / "fp8.yaml")).cases if case.provider != "fa3"]
    plan = make_plan(cases, PROVIDERS, H200, 1, 0)
    assert plan.skips == ()
    assert len(plan.cases) == 2 * 12
    assert {case.problem.heads_q * case.problem.head_dim for case in plan.cases} == {2048}


MINE = """
import torch

algorithm = "materialised"


def attention(q, k, v, descales, *, mask, window, scale):
    of_q, of_k, of_v = descales[:, :, None, None].unbind(-1)
    scores = (q.float() * of_q) @ (k.float() * of_k).transpose(2, 3) * scale
    return (torch.softmax(scores, -1) @ (v.float() * of_v)).bfloat16()


def no_scales(q, k, v, descales, **options):
    return attention(q, k, v, torch.ones_like(descales), **options)
"""


def test_a_kernel_of_ones_own_is_given_the_scales_checked_and_timed(cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    arguments = (
        "--dtype",
        "fp8",
        "--seq-len",
        "64",
        "--head-dim",
        "32",
        "--heads",
        "2",
        "--mask",
        "none",
        "--device",
        "cpu",
    )
    done = cli("sweep", *arguments, "--provider", "mine.py:attention,mine.py:no_scales,naive", "--out", "out")
    assert done.returncode == 4
    (path,) = (tmp_path / "out").rglob("rows.jsonl")
    rows = {row["case"]["provider"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert {name: row["status"] for name, row in rows.items()} == {
        "mine.py:attention": "ok", "mine.py:no_scales": "incorrect", "naive": "unsupported"
    }  # fmt: skip
    assert rows["naive"]["reason"] == "fp8 is not supported by this provider"
    refused = cli("sweep", *arguments, "--mode", "backward", "--provider", "mine.py:attention", "--dry-run")
    assert "fp8 is measured in mode forward only, not backward" in refused.stdout
