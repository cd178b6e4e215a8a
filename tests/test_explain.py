"""`explain`: every figure of the argument, from the tool's own models, in a text that can be read and as JSON."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashbench.cli import explain
from flashbench.errors import UsageError
from flashbench.model.online_softmax import online_softmax, weights

GOLDEN = Path(__file__).parent / "data" / "explain"


def run(line: str) -> str:
    app = typer.Typer()
    explain.register(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["explain", *shlex.split(line)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def read(line: str) -> Any:
    return json.loads(run(f"{line} --json"))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("work", "work --seq-len 8192 --head-dim 64 --dtype fp16"),
        ("softmax", "softmax --scores 1,3,2,4,1,0,5,2 --values 1,4,2,5,3,0,6,2 --block 2"),
        ("softmax-weights", "softmax --scores 1,3,2,4"),
        ("kv-cache", "kv-cache --layers 32 --kv-heads 8 --head-dim 128 --tokens 100000"),
        ("paper", "paper"),
    ],
)
def test_the_text_is_the_one_that_was_read_and_approved(file: str, line: str) -> None:
    assert run(line) == (GOLDEN / f"{file}.txt").read_text()


def figures(line: str) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in read(line)["figures"]}


@pytest.mark.parametrize(
    ("name", "value", "within"),
    [
        ("one N x N matrix of scores", 134.2, 0.05),
        ("the two matrix products", 17.18, 0.005),
        ("with the softmax", 17.5, 0.05),
        ("HBM traffic, materialised", 541, 0.5),
        ("N x N traffic, flash", 0, 0),
        ("intensity, materialised", 32, 0.5),
        ("intensity of QKᵀ alone, d = 64", 63, 0.5),
        ("intensity of QKᵀ alone, d = 128", 124, 0.5),
        ("backward, matrices stored", 8 * 8192**2 * 64 / 1e9, 1e-9),
        ("backward, recomputed (flash)", 10 * 8192**2 * 64 / 1e9, 1e-9),
    ],
)
def test_work_gives_each_figure_of_one_head_of_8192_tokens(name: str, value: float, within: float) -> None:
    assert figures("work --seq-len 8192 --head-dim 64 --dtype fp16")[name] == pytest.approx(value, abs=within)


def test_qk_alone_allows_39_percent_of_the_a100_and_flash_all_of_it() -> None:
    (a100,) = read("work --gpu a100-pcie-80gb")["gpus"]
    assert a100["ridge"] == pytest.approx(161, abs=0.5)
    assert a100["qk"] == pytest.approx(0.39, abs=0.005)
    assert a100["flash"] == 1


def test_a_card_without_a_unit_for_the_dtype_is_named_and_not_invented() -> None:
    text = run("work --dtype fp8 --gpu a100-pcie-80gb,h100-sxm5-80gb")
    assert "No fp8 peak: a100-pcie-80gb." in text
    assert "1,979" in text


def test_a_v_of_8_bits_that_is_transposed_first_moves_once_more_in_each_direction() -> None:
    found = figures("work --dtype fp8 --seq-len 8192 --head-dim 128")
    assert found["with V transposed first"] - found["HBM traffic, flash"] == pytest.approx(2 * 8192 * 128 / 1e6)
    assert "with V transposed first" not in figures("work --dtype bf16")


def test_four_scores_in_blocks_of_two_leave_the_papers_running_sums_and_weights() -> None:
    found = read("softmax --scores 1,3,2,4 --block 2")
    first, second = found["steps"]
    assert (first["m"], first["l"]) == (3, pytest.approx(1.135, abs=5e-4))
    assert (second["alpha"], second["l"]) == (pytest.approx(math.exp(-1)), pytest.approx(1.553, abs=5e-4))
    assert found["weights"] == pytest.approx([0.032, 0.237, 0.087, 0.644], abs=5e-4)
    assert found["result"] is None


def test_eight_scores_with_values_end_at_5_257_and_rescale_when_the_maximum_grows() -> None:
    found = read("softmax --scores 1,3,2,4,1,0,5,2 --values 1,4,2,5,3,0,6,2 --block 2")
    assert [step["alpha"] for step in found["steps"]] == pytest.approx([0, math.exp(-1), 1, math.exp(-1)])
    assert found["result"] == pytest.approx(5.257, abs=5e-4)


def test_the_tiled_form_differs_from_the_plain_one_in_the_last_digit_of_float64() -> None:
    """16 keys, head dimension 8, blocks of 4: 4.44e-16 was read; the last digit depends on the order of the sums."""
    draw = np.random.default_rng(42)
    q, k, v = (draw.standard_normal((16, 8)) for _ in range(3))
    scores = q @ k.T / math.sqrt(8)
    unnormalised = np.exp(scores - scores.max(axis=1, keepdims=True))
    plain = unnormalised / unnormalised.sum(axis=1, keepdims=True) @ v
    tiled = np.empty_like(plain)
    for row in range(16):
        for column in range(8):
            last = online_softmax(scores[row].tolist(), 4, v[:, column].tolist())[-1]
            assert last.o is not None
            tiled[row, column] = last.o / last.l
    assert np.abs(tiled - plain).max() <= 1e-15


@given(
    pairs=st.lists(st.tuples(st.floats(-300, 300), st.floats(-10, 10)), min_size=1, max_size=40),
    block=st.integers(1, 50),
)
def test_blocks_of_any_size_give_the_plain_softmax(pairs: list[tuple[float, float]], block: int) -> None:
    scores, values = [s for s, _ in pairs], [v for _, v in pairs]
    last = online_softmax(scores, block, values)[-1]
    shifted = [math.exp(s - max(scores)) for s in scores]
    expected = sum(w * v for w, v in zip(shifted, values, strict=True)) / sum(shifted)
    assert last.o is not None
    assert last.o / last.l == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert sum(weights(scores, last)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("softmax --scores 1,two", "--scores takes numbers"),
        ("softmax --scores 1,2 --values 1", "each score needs one value"),
        ("softmax --scores 1,inf", "finite"),
        ("softmax --block 0", "at least 1 score"),
        ("work --dtype fp61", "did you mean 'fp16'"),
        ("work --seq-len 0", "at least 1"),
        ("work --gpu a100-pcie-81gb", "did you mean 'a100-pcie-80gb'"),
        ("kv-cache --layers 0", "--layers"),
        ("kv-cache --tokens -5", "at least 1"),
        ("paper --run --device cpu", "no GPU"),
    ],
)
def test_what_cannot_be_worked_out_is_a_usage_error(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(line)


def test_the_kv_cache_of_an_8_billion_parameter_model_takes_128_kib_a_token_and_12_2_gib_in_all() -> None:
    found = figures("kv-cache --layers 32 --kv-heads 8 --head-dim 128 --tokens 100000")
    assert found["one token"] == 128
    assert found["100,000 tokens"] == pytest.approx(13.1, abs=0.05)
    assert found["the same"] == pytest.approx(12.2, abs=0.05)


def test_the_papers_bytes_lie_in_the_models_brackets() -> None:
    plain, flash = read("paper")["rows"]
    assert plain["modelled_gb"] == pytest.approx([25.2, 44.6], abs=0.1)
    assert flash["modelled_gb"] == pytest.approx([1.6, 6.1], abs=0.06)
    for form in (plain, flash):
        low, high = form["modelled_gb"]
        assert low < form["cited_gb"] < high
    assert flash["modelled_gflop"] / plain["modelled_gflop"] == pytest.approx(7 / 6, abs=1e-6)


def test_what_was_not_measured_is_null_beside_what_is_cited() -> None:
    assert [(row["cited_ms"], row["measured_ms"]) for row in read("paper")["rows"]] == [(41.7, None), (7.3, None)]


def test_the_run_beside_the_paper_is_the_papers_problem() -> None:
    from flashbench.cli import sweeping
    from flashbench.model.worksheet import GPT2_MEDIUM

    request = sweeping.requested(None, {**explain.PAPER_OPTIONS, "device": "cpu"})
    cases = [*request.plan.cases, *(skip.case for skip in request.plan.skips)]
    assert {case.problem for case in cases} == {GPT2_MEDIUM}
    assert [case.provider for case in cases] == ["naive", "sdpa-flash"]


def test_a_measured_time_has_a_column_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        explain, "_measure", lambda device, out: ("h200-sxm-141gb", {"naive": 21.46, "sdpa-flash": 4.2})
    )
    header, plain, _ = (
        line for line in run("paper --run").splitlines() if line.startswith(("attention ", "plain ", "flash "))
    )
    assert "ms, cited" in header
    assert "ms, measured on h200-sxm-141gb" in header
    assert plain.split()[-3:] == ["41.7", "21.46", "(naive)"]
