"""The slowed provider does the same work and more of it; the self-test's verdict counts what was found and what was not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gate_sides import A, B, judged, noisy, side

from flashbench.cli.selftest import judged as self_test_verdict
from flashbench.errors import UsageError
from flashbench.providers import slowed, table
from flashbench.records import Case, Device, Problem
from flashbench.run.injection import Injection

CPU = Device("cpu", "a processor", 1 << 34, sdpa_backends=("math", "flash"))
PROBLEM = Problem(1, 2, 2, 48, 64, 16, 16, "fp32", "causal")


def tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(problem.heads_q, problem.seq_q, problem.head_dim)] + 2 * [
        (problem.heads_kv, problem.seq_kv, problem.head_dim)
    ]
    return tuple(torch.randn(problem.batch, *shape, generator=generator) for shape in shapes)


def test_its_output_is_that_of_the_provider_it_slows() -> None:
    q, k, v = tensors(PROBLEM)
    plain = table.get("naive").bind(PROBLEM, CPU).call(q, k, v)
    twin = slowed.get("slowed-12x16:naive").bind(PROBLEM, CPU).call(q, k, v)
    assert torch.equal(plain, twin)


def test_it_works_on_the_named_part_of_the_problem_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []
    naive = table.get("naive")

    def bind(self, problem, device):
        def call(q, k, v):
            seen.append((q.shape[2], k.shape[2], problem.mask))
            return q

        return dataclasses.replace(bound, call=call)

    bound = naive.bind(PROBLEM, CPU)
    monkeypatch.setattr(type(naive), "bind", bind)
    q, k, v = tensors(PROBLEM)
    slowed.bind(PROBLEM, CPU, "slowed-12x16:naive").call(q, k, v)
    assert seen == [(48, 64, "causal"), (12, 16, "none")]


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("slowed-12x16:naive", dataclasses.replace(PROBLEM, mode="backward"), "only a forward pass"),
        ("slowed-49x16:naive", PROBLEM, "no part of 49 x 16"),
        ("slowed-12x65:naive", PROBLEM, "no part of 12 x 65"),
        ("slowed-12x16:sdpa-cudnn", PROBLEM, "cudnn"),
    ],
)
def test_it_says_what_it_cannot_slow(name: str, problem: Problem, words: str) -> None:
    assert words in (slowed.get(name).unsupported(problem, CPU) or "")


def test_its_name_is_part_of_a_case_key_and_names_a_provider_that_exists() -> None:
    case = Case(slowed.slowed_name("mine.py:attention", 12, 16), PROBLEM)
    assert Case.from_key(case.key) == case
    assert slowed.is_slowed(case.provider)
    assert not slowed.is_slowed("naive")
    with pytest.raises(UsageError, match="unknown provider 'naiv'; did you mean 'naive'"):
        slowed.get("slowed-12x16:naiv")


def injected(key: str) -> Injection:
    case = Case.from_key(key)
    return Injection(case, case, 0.05, 0.053, 0.05, 0.06)


@pytest.mark.parametrize(
    ("new_a", "new_b", "code", "words"),
    [
        (1.06, 2.0, 0, "self-test passed: 1 of 1 slowdowns found, 1 unchanged cases quiet"),
        (1.0, 2.0, 3, "self-test failed: 1 of 1 slowdowns missed, 0 false alarms"),
        (1.06, 2.2, 3, "self-test failed: 0 of 1 slowdowns missed, 1 false alarms"),
    ],
)
def test_the_self_test_passes_only_when_the_slowed_case_alone_is_found(
    new_a: float, new_b: float, code: int, words: str
) -> None:
    base = side({A: noisy(1.0, sd=0.001), B: noisy(2.0, sd=0.001, seed=1)})
    new = side({A: noisy(new_a, sd=0.001, seed=2), B: noisy(new_b, sd=0.001, seed=3)})
    found, lines = self_test_verdict(judged(base, new), [injected(A)])
    assert found == code
    assert words in lines[-1]
    assert "injected +5.0 %: +5.3 % by itself" in lines[0]
