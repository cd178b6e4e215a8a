"""Decoding from a config to a checked row: few queries against a KV cache, contiguous or in pages, by every provider that can."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbench.measure.check import check_results
from flashbench.measure.device import describe
from flashbench.measure.reference import make_reference
from flashbench.measure.workload import BEHIND_THE_END, make_inputs, make_operation, same_inputs
from flashbench.model.memory import inputs_bytes, kv_cache_bytes
from flashbench.model.traffic import traffic
from flashbench.providers import slowed
from flashbench.providers.table import PROVIDERS, get
from flashbench.records import Device, Problem

CPU = describe("cpu")
H200 = Device(
    "cuda",
    "NVIDIA H200",
    150_000_000_000,
    capability=(9, 0),
    sm_count=132,
    l2_bytes=60 * 2**20,
    sdpa_backends=("math", "flash", "efficient", "cudnn"),
    versions={"triton": "3.6.0"},
)
TOKEN = Problem(2, 4, 2, 1, 50, 16, 16, "fp32", mode="decode")
PAGED = dataclasses.replace(TOKEN, page_size=8)
LONG = Problem(1, 32, 8, 1, 131072, 128, 128, "bf16", mode="decode")


@pytest.mark.parametrize("mask", ["none", "causal", "window:20"])
@pytest.mark.parametrize("seq_q", [1, 3])
@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "sdpa-math", "sdpa-flash"])
def test_decoding_sees_the_whole_cache(name: str, seq_q: int, mask: str) -> None:
    asked = dataclasses.replace(TOKEN, seq_q=seq_q, mask=mask)
    assert get(name).unsupported(asked, CPU) is None
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    results = make_operation(asked, get(name).bind(asked, CPU), inputs).results()
    assert check_results(asked, make_reference(asked, inputs, CPU), results).problem is None


@pytest.mark.parametrize("seq_q", [1, 4])
@pytest.mark.parametrize("name", ["naive", "sdpa-flash", "flash-v2", "flash-decode"])
def test_a_long_cache_can_be_decoded_on_a_hopper_card(name: str, seq_q: int) -> None:
    assert get(name).unsupported(dataclasses.replace(LONG, seq_q=seq_q), H200) is None


@pytest.mark.parametrize("mode", ["forward", "backward", "forward_backward"])
def test_the_decoding_kernel_leaves_other_modes_to_others(mode: str) -> None:
    reason = get("flash-decode").unsupported(dataclasses.replace(LONG, mode=mode), H200)
    assert reason == f"flash-decode is for mode decode, few queries against a long cache; flash-v2 runs {mode}"


@pytest.mark.parametrize(
    "name", [name for name in sorted(PROVIDERS) if PROVIDERS[name].unsupported(LONG, H200) is None]
)
def test_every_other_provider_that_decodes_says_that_it_cannot_read_pages(name: str) -> None:
    reason = get(name).unsupported(dataclasses.replace(LONG, page_size=16), H200)
    assert (reason is None) == (name == "flash-decode")
    assert reason is None or "paged" in reason


def test_a_function_of_ones_own_and_a_slowed_provider_get_no_pages(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def attention(q, k, v, **_):\n    return q\n")
    for provider in (get(f"{own}:attention"), slowed.get("slowed-1x16:flash-decode")):
        assert "paged" in (provider.unsupported(dataclasses.replace(LONG, page_size=16), H200) or "")
        assert provider.unsupported(LONG, H200) is None


def test_the_pages_of_a_problem_hold_its_keys_and_values_in_the_order_of_the_table() -> None:
    inputs = make_inputs(PAGED, 0, torch.device("cpu"))
    q, k_pages, v_pages, table, lengths = inputs.arguments
    assert torch.equal(q, inputs.q)
    assert lengths.tolist() == [50, 50]
    assert sorted(table.flatten().tolist()) == list(range(2 * 7))
    assert table.flatten().tolist() != list(range(2 * 7))
    for pages, contiguous in ((k_pages, inputs.k), (v_pages, inputs.v)):
        for sequence in range(2):
            keys = torch.cat([pages[page] for page in table[sequence].tolist()], dim=1)
            assert torch.equal(keys[:, :50], contiguous[sequence])
            assert bool((keys[:, 50:] == BEHIND_THE_END).all())


def test_a_paged_cache_takes_the_bytes_that_the_model_counts() -> None:
    given = make_inputs(PAGED, 0, torch.device("cpu")).arguments
    assert sum(t.numel() * t.element_size() for t in given) == inputs_bytes(PAGED)


def test_pages_have_the_same_keys_as_the_contiguous_cache_and_the_same_bits_each_time() -> None:
    contiguous, paged = (make_inputs(p, 3, torch.device("cpu")) for p in (TOKEN, PAGED))
    assert torch.equal(contiguous.k, paged.k)
    assert contiguous.cache is None
    assert same_inputs(PAGED, 3, paged)
    assert not same_inputs(PAGED, 4, paged)


@pytest.mark.parametrize("which", range(5), ids=["q", "k pages", "v pages", "page table", "lengths"])
def test_a_provider_that_writes_to_anything_it_was_given_is_found_out(which: int) -> None:
    inputs = make_inputs(PAGED, 0, torch.device("cpu"))
    inputs.arguments[which].flatten()[-1] += 1
    assert not same_inputs(PAGED, 0, inputs)


def test_the_roofline_counts_the_whole_cache_once() -> None:
    provider = get("flash-decode")
    moved = traffic(provider.algorithm, LONG, l2_bytes=H200.l2_bytes, sm_count=132, schedule=provider.schedule)
    assert kv_cache_bytes(LONG) == 2 * 8 * 131072 * 128 * 2
    assert moved.low == kv_cache_bytes(LONG) + 2 * 32 * 128 * 2
    assert moved.low <= moved.estimate < 1.005 * moved.low


CONFIG = """
version: 1
name: decode
device: cpu
providers: [naive, flash-decode]
problems: {mode: decode, dtype: fp32, seq_len: 3/150, head_dim: 16, heads: "4/2", mask: causal}
include:
  - {mode: decode, dtype: fp32, seq_len: 150, head_dim: 16, heads: 2, page_size: [7, 32]}
"""


@pytest.mark.interpreter
def test_a_sweep_in_the_interpreter_checks_contiguous_and_paged_decoding(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "decode.yaml").write_text(CONFIG)
    done = cli("sweep", "decode.yaml", "--check-only", "--out", "out", TRITON_INTERPRET="1", OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("rows.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = {row["case"]["problem"].get("page_size"): row for row in rows if row["case"]["provider"] == "flash-decode"}
    assert {page: row["status"] for page, row in own.items()} == {None: "checked", 7: "checked", 32: "checked"}
    assert all(row["check"]["run_to_run_max"] == 0 and row["launch"]["splits"] >= 1 for row in own.values())
    others = {row["status"] for row in rows if row["case"]["provider"] == "naive"}
    assert others == {"checked", "unsupported"}
