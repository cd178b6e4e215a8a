"""`flashbench tune`: what it tries, what it drops, how it ranks, and what it writes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.analysis.ranking import rank
from flashbench.cli.tuning import distinct, kernels
from flashbench.errors import UsageError
from flashbench.kernels.blocks import FORWARD, BlockShape, block_table, candidate_blocks, read_table, table_text
from flashbench.kernels.shape_file import rewritten
from flashbench.kernels.tunable import TUNABLE
from flashbench.records import Device
from flashbench.run.tune import Wanted, entries, small

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
H200 = Device("cuda", "NVIDIA H200", 141 << 30, 0, "GPU-0", (9, 0), 132, 60 << 20, 227 << 10)
WANTED = Wanted((FORWARD,), ((64, 64), (128, 128)), ("bf16",), (4096, 16384), ("none", "causal"))

shapes = st.builds(
    BlockShape, st.sampled_from([16, 64]), st.sampled_from([16, 32]), st.just(4), st.integers(1, 4), st.booleans()
)
lists = [
    (kernel, family, kind, width)
    for kernel, families in block_table().items()
    for family, kinds in families.items()
    for kind, widths in kinds.items()
    for width in widths
]


def comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("#")]


@settings(max_examples=30)
@given(path=st.sampled_from(lists), found=st.lists(shapes, min_size=1, max_size=9, unique=True))
def test_rewriting_a_list_changes_that_list_and_keeps_every_comment(
    path: tuple[str, str, str, int], found: list[BlockShape]
) -> None:
    text = rewritten(table_text(), path, found, "measured")
    kernel, family, kind, width = path
    expected = read_table(table_text())
    expected[kernel][family][kind][width] = tuple(found)
    assert read_table(text) == expected
    assert comments(text) == comments(table_text())


@pytest.mark.parametrize(
    "path",
    [(FORWARD, "sm_90", "half", 16), (FORWARD, "sm_90", "ieee", 64), (FORWARD, "sm_70", "half", 64), ("new", "sm_90", "half", 64)],
    ids=["width", "kind", "family", "kernel"],
)  # fmt: skip
def test_a_list_that_is_missing_is_added(path: tuple[str, str, str, int]) -> None:
    kernel, family, kind, width = path
    text = rewritten(table_text(), path, [BlockShape(64, 32, 4, 2)], "measured")
    assert read_table(text)[kernel][family][kind][width] == (BlockShape(64, 32, 4, 2),)
    assert comments(text) == comments(table_text())


def test_a_kernel_without_rows_gets_its_first() -> None:
    text = rewritten("# head\nold: {}\n\nother: {}\n", ("old", "sm_90", "half", 64), [BlockShape(64, 32, 4, 2)], "how")
    assert text == "# head\nold:\n  sm_90:\n    half:\n      64:  # how\n        - 64x32 w4 s2\n\nother: {}\n"


def test_a_comment_at_a_shape_moves_with_it() -> None:
    text = (
        "k:\n  f:\n    half:\n      64:  # old\n        - 16x16 w4 s1  # slow\n        # why\n        - 16x16 w4 s2\n"
    )
    found = rewritten(text, ("k", "f", "half", 64), [BlockShape(16, 16, 4, 2), BlockShape(16, 16, 4, 1)], "new")
    assert (
        found
        == "k:\n  f:\n    half:\n      64:  # new\n        # why\n        - 16x16 w4 s2\n        - 16x16 w4 s1  # slow\n"
    )


def test_a_list_on_one_line_is_refused() -> None:
    with pytest.raises(UsageError, match="one a line"):
        rewritten("k:\n  f:\n    half:\n      64: [16x16 w4 s1]\n", ("k", "f", "half", 64), [], "new")


times = st.dictionaries(
    st.sampled_from("abcd"),
    st.fixed_dictionaries({p: st.lists(st.floats(0.1, 10), min_size=1, max_size=3) for p in ("short", "long")}),
    min_size=1,
)


@given(times_ms=times, factor=st.floats(0.01, 100))
def test_how_long_a_problem_is_does_not_weigh_in_the_ranking(
    times_ms: dict[str, dict[str, list[float]]], factor: float
) -> None:
    scaled = {c: {**found, "long": [t * factor for t in found["long"]]} for c, found in times_ms.items()}
    assert dict(rank(scaled)) == pytest.approx(dict(rank(times_ms)))


def test_the_figure_of_a_rank_is_the_mean_ratio_to_the_best() -> None:
    ranked = rank({"a": {"x": [1.0], "y": [4.0]}, "b": {"x": [2.0], "y": [2.0]}})
    assert dict(ranked) == pytest.approx({"a": math.sqrt(2), "b": math.sqrt(2)})


def test_a_candidate_that_was_not_timed_everywhere_stands_behind_those_that_were() -> None:
    ranked = rank({"b": {"x": [1.0]}, "a": {"x": [9.0], "y": [9.0]}})
    assert [candidate for candidate, _ in ranked] == ["a", "b"]
    assert dict(ranked) == pytest.approx({"a": 3.0, "b": 1.0})


def test_every_tunable_kernel_has_its_section_of_the_table() -> None:
    assert set(TUNABLE) <= set(block_table())


def test_a_list_of_the_table_is_tuned_on_all_problems_that_read_it() -> None:
    wanted = Wanted((FORWARD,), ((80, 80), (128, 128), (64, 64)), ("bf16", "fp16"), (4096,), ("causal",))
    found = entries(wanted, H200)
    assert [(entry.kind, entry.width) for entry in found] == [("half", 128), ("half", 64)]
    assert [problem.head_dim for problem in found[0].problems] == [80, 128, 80, 128]


def test_the_shapes_tried_are_the_tables_and_with_wide_more() -> None:
    narrow, wide = entries(WANTED, H200)[1], entries(Wanted(**{**_fields(WANTED), "wide": True}), H200)[1]
    assert narrow.shapes == candidate_blocks((9, 0), "bf16", 128)
    assert wide.shapes[: len(narrow.shapes)] == narrow.shapes
    assert len(wide.shapes) > len(narrow.shapes)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_rows_that_no_descriptor_can_read_are_tried_through_pointers_only() -> None:
    (entry,) = entries(Wanted((FORWARD,), ((20, 20),), ("bf16",), (4096,), ("none",)), H200)
    assert entry.shapes
    assert not any(shape.descriptors for shape in entry.shapes)


@given(seq_len=st.integers(1, 20_000), mask=st.sampled_from(["none", "causal", "window:1000"]))
def test_the_problem_of_the_check_is_short_and_leaves_the_remainders_that_a_kernel_is_compiled_for(
    seq_len: int, mask: str
) -> None:
    (entry,) = entries(Wanted((FORWARD,), ((64, 64),), ("bf16",), (seq_len,), (mask,)), H200)
    problem = small(entry.problems[0], "cuda")
    assert problem.seq_kv < 1024
    assert problem.seq_kv % 256 == seq_len % 256
    assert problem.window is None or problem.window < problem.seq_kv


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from compile_child import AbsentGpu
from triton.runtime import driver

from flashbench.kernels import flash_v2
from flashbench.kernels.blocks import parse_shape
from flashbench.kernels.inputs import DeviceLimits
from flashbench.records import Problem
from flashbench.run.tune import small

driver.set_active(AbsentGpu(90))
flash_v2.device_limits = lambda _: DeviceLimits((9, 0), 227 << 10, 50 << 20)

def compiled(p):
    shapes = (p.heads_q, p.seq_q), (p.heads_kv, p.seq_kv), (p.heads_kv, p.seq_kv)
    q, k, v = (torch.empty(p.batch, *shape, 64, dtype=torch.bfloat16, device="meta") for shape in shapes)
    launch = flash_v2.prepare(q, k, v, mask=p.mask, blocks=parse_shape("64x64 w4 s2 tma"))
    return flash_v2.flash_v2_kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants).hash

for seq in (1000, 16384):
    for mask in ("none", "causal", "window:1000"):
        p = Problem(4, 8, 8, seq, seq, 64, 64, "bf16", mask)
        print(compiled(small(p, "cuda")) == compiled(p))
"""


@pytest.mark.compile
def test_what_the_check_compiles_is_what_is_timed() -> None:
    kernels_folder = str(Path(__file__).parent / "kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", COMPILE, kernels_folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["True"] * 6, done.stderr


def test_a_word_names_every_kernel_that_begins_with_it_and_a_wrong_one_the_nearest() -> None:
    assert FORWARD in kernels(["flash-v2"])
    assert kernels([]) == tuple(name for name in TUNABLE if block_table()[name])
    with pytest.raises(UsageError, match=f"did you mean '{FORWARD}'"):
        kernels(["flash-v2 foward"])


def test_columns_are_called_by_what_tells_the_problems_apart() -> None:
    assert distinct(["forward bf16 s4096 d64", "forward bf16 s4096 d64 causal"]) == ["dense", "causal"]


def test_without_a_gpu_it_says_in_a_line_what_it_needs(cli: Cli) -> None:
    done = cli("tune", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert "a CUDA GPU" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("option", "value"), [("--head-dim", "sixty"), ("--mask", "window:0"), ("--dtype", "bf17")])
def test_a_wrong_value_is_refused_by_its_option(cli: Cli, option: str, value: str) -> None:
    done = cli("tune", "--check-only", option, value, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"flashbench: {option}: '{value}'")


def test_an_order_cannot_be_written_without_times(cli: Cli) -> None:
    done = cli("tune", "--check-only", "--write", "package")
    assert done.returncode == 2
    assert "--write needs times" in done.stderr


@pytest.mark.interpreter
def test_in_the_interpreter_the_shapes_of_every_family_are_checked(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", FORWARD, "--check-only", "--head-dim", "256", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    (rows,) = tmp_path.glob("results/*/*-tune/rows.jsonl")
    trials = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {trial["status"] for trial in trials} == {"ok"}
    tried = {trial["shape"] for trial in trials}
    for capability in ((8, 0), (9, 0), (10, 0)):
        assert {shape.row() for shape in candidate_blocks(capability, "fp16", 256)} <= tried


FAKE = '''
"""A kernel that does by its block shape: w1 dies, w2 hangs, w4 is wrong, w8 is right and takes the longer the more stages it has."""
import os, signal, time
from flashbench.kernels import blocks, tunable
from flashbench.run import trials

trials.CHECK_SECONDS = 10.0
shapes = ["16x16 w1 s1", "16x16 w2 s1", "16x16 w4 s1", "16x16 w8 s4", "16x16 w8 s2", "16x16 w8 s3"]
rows = "".join(f"        - {shape}\\n" for shape in shapes)
blocks.table_text = lambda: f"# head\\nfake:\\n  interpreter:\\n    # a note\\n    half:\\n      16:\\n{rows}    # more\\n    ieee: {{}}\\n"

def bind(problem, shape, q, k, v, grad_out):
    import torch
    out = torch.empty_like(q)
    def run():
        if shape.num_warps == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if shape.num_warps == 2:
            time.sleep(1e6)
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal"))
        if shape.num_warps == 4:
            out.neg_()
        time.sleep(shape.num_stages**2 * 2e-3)
    return tunable.Trial(run, {"out": out})

tunable.TUNABLE.clear()
tunable.TUNABLE["fake"] = tunable.Tunable("forward", bind, blocks.shared_bytes, lambda shape, width: 0)
'''
PROGRAM = """
import sys
from pathlib import Path
from flashbench.cli import tuning
from flashbench.run.devices import find_device
from flashbench.run.tune import Wanted, entries

device = find_device("cpu")
wanted = Wanted(("fake",), ((16, 16),), ("fp16",), (32, 64), ("none",), tokens=64, hidden=16)
sys.exit(tuning.execute(entries(wanted, device), device, Path("out"), 2, False, Path("mine.yaml")))
"""


@pytest.mark.slow
def test_shapes_that_die_hang_or_err_are_dropped_and_the_others_ranked_by_their_times(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(FAKE)
    path = os.pathsep.join(filter(None, [str(tmp_path / "hooks"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert re.search(r"16x16 w1 s1 crashed: the worker was killed by SIGKILL", done.stderr)
    assert re.search(r"16x16 w2 s1 timeout: no answer within 10 s", done.stderr)
    assert re.search(r"16x16 w4 s1 incorrect: out is wrong", done.stderr)
    text = (tmp_path / "mine.yaml").read_text()
    assert [row.partition("- ")[2] for row in text.splitlines() if "- 16x16" in row] == [
        f"16x16 w8 s{n}" for n in (2, 3, 4)
    ]
    assert comments(text) == ["# head", "# a note", "# more"]
    (rows,) = tmp_path.glob("out/*/*-tune/rows.jsonl")
    timed = [trial for line in rows.read_text().splitlines() if (trial := json.loads(line))["step"] == "time"]
    # Twice as slow as the best on one problem: not timed on the other, nor again.
    assert sorted((trial["shape"][-2:], trial["round"]) for trial in timed) == sorted(
        [("s2", 0), ("s2", 0), ("s2", 1), ("s2", 1), ("s3", 0), ("s4", 0)]
    )


def gpu_is_missing() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(gpu_is_missing(), reason="needs a CUDA GPU, and torch sees none")
def test_on_a_gpu_every_shape_of_the_table_is_right_and_timed(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", FORWARD, "--head-dim", "64", "--seq-len", "1k", "--mask", "causal", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("results/*/*-tune")
    trials = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {trial["status"] for trial in trials} <= {"ok", "unsupported"}
    timed = {trial["shape"]: trial["median_ms"] for trial in trials if trial["step"] == "time"}
    (place,) = {(trial["family"], trial["kind"], trial["width"]) for trial in trials}
    family, kind, width = place
    found = [
        shape.row() for shape in read_table((folder / "block_shapes.yaml").read_text())[FORWARD][family][kind][width]
    ]
    assert sorted(timed, key=timed.__getitem__) == found[: len(timed)]
