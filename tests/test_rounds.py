"""What the rounds of a comparison rest on: the base's timers, each side's own imports, anchors beside the rows, stages by number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gate_sides import A, B, rounds, side
from stored_runs import H200, write_run

from flashbench.errors import UsageError
from flashbench.records import Case
from flashbench.run.checkout import Checkout, checked_out
from flashbench.run.plan import Plan
from flashbench.run.process import OWN, Launch
from flashbench.run.rounds import Arm, Protocol
from flashbench.store.anchors import Anchor, append_anchors, load_anchors
from flashbench.store.read import load_run
from flashbench.store.side import side_of_run, staged


def test_both_sides_are_timed_by_the_method_of_the_stored_base() -> None:
    protocol = Protocol({}, 60.0, anchors=True)
    protocol.learn_timers(side({A: rounds([1.0, 1.0], method="profiler"), B: rounds([1.0, 1.0], method="wall")}))
    assert protocol.timers == {A: "profiler"}, "a CPU has one clock only, which nobody chooses"


def test_a_sides_own_folders_come_before_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/given")
    assert Launch(path=("/tree/src", "/tree")).environment["PYTHONPATH"] == os.pathsep.join(
        ["/tree/src", "/tree", "/given"]
    )
    assert OWN.environment["PYTHONPATH"] == "/given"


def test_a_checkout_with_a_source_folder_imports_from_it(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    launch = Checkout("main", tmp_path, tmp_path).launch("python3")
    assert launch.path == (str(tmp_path / "src"), str(tmp_path))
    assert launch.command()[0] == "python3"


def test_outside_a_repository_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--base: git rev-parse failed"), checked_out("main", "--base"):
        pass


def test_anchors_are_read_by_name_and_round_without_half_a_line(tmp_path: Path) -> None:
    append_anchors(tmp_path, 0, [Anchor("gemm", (0.2, 0.3, 0.9)), Anchor("copy", (0.5,))])
    append_anchors(tmp_path, 1, [Anchor("gemm", (0.4, 0.4))])
    with (tmp_path / "anchors.jsonl").open("a") as file:
        file.write('{"round": 2, "name": "ge')
    assert load_anchors(tmp_path) == {"gemm": {0: 0.3, 1: 0.4}, "copy": {0: 0.5}}


def test_a_run_without_anchors_has_none(tmp_path: Path) -> None:
    assert load_anchors(tmp_path) == {}


def test_a_stored_run_is_a_side_with_its_anchors_identity_and_versions(tmp_path: Path) -> None:
    found = side_of_run(load_run(write_run(tmp_path, {A: [1.0, 2.0]})))
    assert [seen.median_ms for seen in found.cases[A]] == [1.0, 2.0]
    assert found.anchors["copy"] == {0: 0.3, 1: 0.3}
    assert (found.identity.device, found.identity.power_limit_w) == ("h200-sxm-141gb", 700.0)
    assert found.versions["torch"] == "2.11.0"


def test_a_run_may_say_under_which_key_a_case_is_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path, {A: [1.0], B: [2.0]}, compared_as={A: A.replace("sdpa-flash", "flash-v2")})
    assert set(side_of_run(load_run(run)).cases) == {A.replace("sdpa-flash", "flash-v2"), B}


def test_an_arm_compares_a_case_under_the_other_sides_key(tmp_path: Path) -> None:
    from flashbench.store.run import RunWriter

    case = Case.from_key(A)
    with RunWriter.create(tmp_path, "h200-sxm-141gb", "x", {}) as writer:
        arm = Arm(Plan(H200, (case,), (), 6, 0), writer, compared_as={A: B})
    assert arm.key(case) == B


def test_rounds_are_split_by_their_number_and_so_are_their_anchors() -> None:
    whole = side({A: rounds([1.0] * 8), B: rounds([1.0] * 6)}, anchors={"gemm": dict.fromkeys(range(8), 0.2)})
    first, fresh = staged(whole, 6)
    assert [seen.round for seen in first.cases[A]] == list(range(6))
    assert [seen.round for seen in fresh.cases[A]] == [6, 7]
    assert set(fresh.cases) == {A}
    assert set(fresh.anchors["gemm"]) == {6, 7}
    assert staged(whole, None)[0] == whole
    assert not staged(whole, None)[1].cases
