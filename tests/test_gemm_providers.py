"""The two matrix products alone, as providers: checked as products, counted as products, and never taken for attention."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbench.measure.check import check_results
from flashbench.measure.device import describe
from flashbench.measure.limits import beyond_physics
from flashbench.measure.reference import make_reference
from flashbench.measure.workload import make_inputs, make_operation, same_inputs
from flashbench.model.flops import exponentials, useful_flops
from flashbench.model.memory import footprint
from flashbench.model.traffic import arithmetic_intensity, traffic
from flashbench.providers.table import get
from flashbench.records import Case, Device, Problem

CPU = describe("cpu")
H200 = Device(
    "cuda", "NVIDIA H200", 150_754_820_096, capability=(9, 0), sm_count=132, l2_bytes=60 << 20, max_sm_clock_mhz=1980
)
GEMMS = ("gemm-qk", "gemm-pv")
SHAPES = {
    "square": (2, 2, 2, 40, 40, 16, 16),
    "grouped heads": (2, 4, 2, 33, 47, 16, 8),
    "one key/value head": (1, 3, 1, 20, 9, 5, 7),
}


def long_head(head_dim: int) -> Problem:
    return Problem(1, 1, 1, 8192, 8192, head_dim, head_dim, "fp16")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GEMMS)
def test_a_product_alone_is_right(name: str, shape: str, dtype: str) -> None:
    asked, provider = Problem(*SHAPES[shape], dtype), get(name)
    inputs = make_inputs(asked, 0, torch.device("cpu"), provider.computes)
    operation = make_operation(asked, provider.bind(asked, CPU), inputs)
    reference = make_reference(asked, inputs, CPU)
    outcome = check_results(asked, reference, operation.results())
    assert outcome.problem is None
    assert same_inputs(asked, 0, inputs)
    columns = asked.seq_kv if name == "gemm-qk" else asked.head_dim_v
    assert reference.true["out"].shape == (asked.batch, asked.heads_q, asked.seq_q, columns)


def test_the_scores_are_those_of_each_pair_and_not_scaled() -> None:
    asked = Problem(*SHAPES["grouped heads"], "fp32")
    inputs = make_inputs(asked, 0, torch.device("cpu"), "scores")
    scores = make_operation(asked, get("gemm-qk").bind(asked, CPU), inputs).results()["out"]
    assert scores[1, 3, 5, 7].item() == pytest.approx(float(inputs.q[1, 3, 5] @ inputs.k[1, 1, 7]), rel=1e-5)


def test_values_are_summed_with_weights_that_were_drawn_before_the_call() -> None:
    asked = Problem(*SHAPES["grouped heads"], "fp32")
    inputs = make_inputs(asked, 0, torch.device("cpu"), "values")
    out = make_operation(asked, get("gemm-pv").bind(asked, CPU), inputs).results()["out"]
    assert inputs.weights is not None
    assert 0 <= float(inputs.weights.min()) < 0.01 < 0.99 < float(inputs.weights.max()) < 1
    assert out[1, 3, 5, 2].item() == pytest.approx(float(inputs.weights[1, 3, 5] @ inputs.v[1, 1, :, 2]), rel=1e-5)


@pytest.mark.parametrize("name", GEMMS)
def test_grouped_heads_share_a_product_and_nothing_is_copied(name: str) -> None:
    """The output, and nothing of the size of K or V repeated to the query heads."""
    from flashbench.measure.memory import measure_memory

    asked, provider = Problem(1, 8, 2, 64, 64, 64, 64, "fp32"), get(name)
    inputs = make_inputs(asked, 0, torch.device("cpu"), provider.computes)
    operation = make_operation(asked, provider.bind(asked, CPU), inputs)
    operation.run()
    memory = measure_memory(operation.run, CPU)
    assert memory is not None
    assert memory.peak_bytes == footprint(provider.algorithm, asked).peak


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize(("head_dim", "flop_per_byte"), [(64, 63), (128, 124)])
def test_over_8192_tokens_a_product_alone_has_63_flop_per_byte_at_d_64_and_124_at_128(
    name: str, head_dim: int, flop_per_byte: int
) -> None:
    p, algorithm = long_head(head_dim), get(name).algorithm
    intensity = arithmetic_intensity(useful_flops(p, algorithm), traffic(algorithm, p))
    assert intensity.estimate == pytest.approx(flop_per_byte, abs=0.5)


def test_both_products_together_are_the_work_of_attention_and_take_no_exponential() -> None:
    p = long_head(64)
    assert sum(useful_flops(p, get(name).algorithm) for name in GEMMS) == useful_flops(p, get("naive").algorithm)
    assert [exponentials(p, get(name).algorithm) for name in GEMMS] == [0, 0]
    assert exponentials(p, get("naive").algorithm) == 8192**2


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": "causal"}, "no mask 'causal'"),
        ({"mask": "window:8"}, "no mask 'window:8'"),
        ({"mode": "backward"}, "forward pass only"),
        ({"mode": "decode"}, "forward pass only"),
        ({"dtype": "fp8"}, "fp8"),
        ({"page_size": 16}, "paged"),
    ],
)
def test_what_is_no_dense_forward_product_has_a_reason(name: str, changes: dict[str, Any], words: str) -> None:
    reason = get(name).unsupported(dataclasses.replace(long_head(64), **changes), H200)
    assert reason is not None
    assert words in reason


def test_a_product_is_held_to_the_limits_of_a_product() -> None:
    """Half of attention's work: 600 TFLOP/s of QKᵀ are possible on an H200, the same time would be 1,200 of attention."""
    p = dataclasses.replace(long_head(128), batch=8, heads_q=16, heads_kv=16, dtype="bf16")
    time_ms = useful_flops(p, "gemm-qk") / 600e9
    assert beyond_physics(Case("naive", p), [time_ms], H200) is not None
    spacious = dataclasses.replace(H200, l2_bytes=1 << 50)  # whose bandwidth is not the question here
    assert beyond_physics(Case("gemm-qk", p), [time_ms], spacious, "gemm-qk") is None
    words = beyond_physics(Case("gemm-qk", p), [time_ms], H200, "gemm-qk")
    assert words is not None
    assert "GB/s" in words, "S alone is 17 GB"


TINY = """
version: 1
name: products
device: cpu
providers: [gemm-qk, gemm-pv, naive]
problems: {dtype: fp32, seq_len: [64, 96], head_dim: 32, heads: "4/2", mask: [none, causal]}
measure: {min_samples: 5, max_seconds: 0.05, warmup_ms: 10, confidence_width: 20%}
"""


def test_a_sweep_shows_and_draws_the_products_as_what_they_are(cli, tmp_path: Path) -> None:
    (tmp_path / "products.yaml").write_text(TINY)
    done = cli("sweep", "products.yaml", "--out", "out", "--provider", "gemm-qk,gemm-pv,naive")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in next(tmp_path.rglob("rows.jsonl")).read_text().splitlines()]
    ok = [row["case"]["provider"] for row in rows if row["status"] == "ok"]
    assert sorted(ok) == ["gemm-pv"] * 2 + ["gemm-qk"] * 2 + ["naive"] * 4
    assert all("no mask" in row["reason"] for row in rows if row["status"] != "ok")

    shown = cli("show", "out", "--format", "csv", "--reference", "naive")
    assert shown.returncode == 0, shown.stderr
    table = list(csv.DictReader(io.StringIO(shown.stdout)))
    products = [row for row in table if row["provider"] in GEMMS and row["status"] == "ok"]
    whole = {row["problem"]: row for row in table if row["provider"] == "naive"}
    assert len(products) == 4
    for row in products:
        assert float(row["flops"]) == float(whole[row["problem"]]["flops"]) / 2
        assert row["speedup"] == ""
        assert "no attention" in row["remarks"]

    drawn = cli("roofline", "out", "--out", "figure.svg")
    assert drawn.returncode == 0, drawn.stderr
    assert "gemm-qk" in (tmp_path / "figure.svg").read_text()


WRONG = """
algorithm = "gemm-qk"

def scores(q, k, *, mask, window, scale):
    return scale * (q @ k.transpose(-1, -2))  # QKᵀ is not scaled

def right(q, k, **_):
    return q @ k.transpose(-1, -2)
"""


def test_a_wrong_product_of_ones_own_is_incorrect_and_a_right_one_is_timed(cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    shape = ("--seq-len", "64", "--heads", "2", "--head-dim", "32", "--dtype", "fp32", "--device", "cpu")
    done = cli("sweep", "--provider", "mine.py:scores,mine.py:right", *shape, "--out", "out")
    assert done.returncode == 4, done.stderr
    rows = [json.loads(line) for line in next(tmp_path.rglob("rows.jsonl")).read_text().splitlines()]
    found = {row["case"]["provider"]: row for row in rows if row["case"]["problem"]["mask"] == "none"}
    assert found["mine.py:right"]["status"] == "ok"
    assert found["mine.py:scores"]["status"] == "incorrect"
    assert "out is wrong" in found["mine.py:scores"]["reason"]
