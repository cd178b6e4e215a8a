"""Derived columns: exact rates, honest intervals, and nothing where nothing was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flashbench.analysis.measured import gbps, tflops
from flashbench.analysis.metrics import METRICS, derive, summarise
from flashbench.errors import UsageError
from flashbench.hardware.catalogue import get
from flashbench.hardware.ceilings import Ceiling
from flashbench.model.schedule import Schedule
from flashbench.model.traffic import traffic
from flashbench.records import Case, Check, Device, Memory, Problem, Row, State, Status, Timing
from flashbench.store.frame import frame
from flashbench.store.read import load_run
from flashbench.store.run import RunWriter

A100 = get("a100-pcie-80gb")
DEVICE = Device("cuda", "NVIDIA A100 80GB PCIe", 85_000_000_000, capability=(8, 0), sm_count=108, l2_bytes=40 * 2**20)
PROBLEM = Problem(4, 16, 16, 4096, 4096, 128, 128, "bf16", "causal")
FLOPS = 4 * 4 * 16 * (4096 * 4097 // 2) * 128  # 4 · B · H · pairs · d
MODELS = {"naive": ("materialised", Schedule()), "flash-v2": ("tiled-v2", Schedule())}
TIMING = Timing("events", "cold", "isolated", 20, 100.0)


def row(
    provider: str = "flash-v2", problem: Problem = PROBLEM, number: int = 0, status: Status = "ok", **more: Any
) -> Row:
    return Row(Case(provider, problem), number, status, timing=TIMING if status == "ok" else None, **more)


def visits(tmp_path: Path, *rows: tuple[Row, list[float]]) -> pd.DataFrame:
    with RunWriter.create(tmp_path, "a100-pcie-80gb", "test", {}) as writer:
        for one, samples in rows:
            writer.append(one, samples)
    return frame(load_run(tmp_path))


def derived(
    tmp_path: Path, *rows: tuple[Row, list[float]], ceilings: tuple[Ceiling, ...] = (), reference: str | None = None
) -> pd.DataFrame:
    summary = summarise(visits(tmp_path, *rows))
    return derive(summary, DEVICE, A100, ceilings, models=MODELS, reference=reference)


def test_rates_are_decimal() -> None:
    # BY-04: 1e9 bytes in 1 ms are 1000 GB/s, 1e12 FLOP in 1 ms are 1000 TFLOP/s
    assert gbps(1e9, 1.0) == 1000.0
    assert tflops(1e12, 1.0) == 1000.0


def test_a_library_that_chose_is_modelled_by_its_choice(tmp_path: Path) -> None:
    models = {"sdpa": ("tiled-v2", Schedule()), "sdpa-math": ("materialised", Schedule())}
    rows = [(row("sdpa", backend=backend), [1.0] * 10) for backend in ("math", "flash")]
    by_backend = {
        one.backend: derive(summarise(visits(tmp_path / str(one.backend), (one, samples))), DEVICE, A100, models=models)
        for one, samples in rows
    }
    assert (
        by_backend["math"]["hbm_bytes"].item()
        == traffic("materialised", PROBLEM, l2_bytes=DEVICE.l2_bytes, sm_count=108, l2_partitions=2).estimate
    )
    assert by_backend["flash"]["hbm_bytes"].item() < by_backend["math"]["hbm_bytes"].item() / 10


def test_work_per_energy_is_the_useful_work_over_the_joules_of_a_call(tmp_path: Path) -> None:
    frame = derived(tmp_path, (row(energy_j=0.5), [1.0] * 10), (row("sdpa-flash"), [1.0] * 10))
    with_energy, without = frame["tflop_per_j"].tolist()
    assert with_energy == pytest.approx(frame["flops"][0] / 1e12 / 0.5)
    assert without is None or without != without


def test_a_rate_without_a_time_is_unknown() -> None:
    assert tflops(1e12, None) is None
    assert tflops(1e12, 0.0) is None


def test_time_rate_and_share_of_the_peak_agree_with_the_formula(tmp_path: Path) -> None:
    line = derived(tmp_path, (row(), [2.0] * 20)).iloc[0]
    assert line["time_ms"] == 2.0
    assert line["flops"] == FLOPS
    assert line["tflops"] == pytest.approx(FLOPS / 2e-3 / 1e12)
    assert line["percent_of_peak"] == pytest.approx(100 * FLOPS / 2e-3 / 312e12)


def test_hbm_bytes_are_those_of_the_traffic_model_and_intensity_follows(tmp_path: Path) -> None:
    line = derived(tmp_path, (row(), [2.0] * 20)).iloc[0]
    moved = traffic("tiled-v2", PROBLEM, l2_bytes=DEVICE.l2_bytes, sm_count=108)
    assert [line[name] for name in ("hbm_bytes_low", "hbm_bytes", "hbm_bytes_high")] == [
        moved.low,
        moved.estimate,
        moved.high,
    ]
    assert line["intensity"] == pytest.approx(FLOPS / moved.estimate)
    assert line["intensity_low"] <= line["intensity"] <= line["intensity_high"]


def test_the_tiles_that_were_launched_count_before_those_of_the_schedule(tmp_path: Path) -> None:
    line = derived(tmp_path, (row(launch={"block_q": 64, "block_kv": 64}), [2.0] * 20)).iloc[0]
    schedule = Schedule(block_q=64, block_kv=64)
    assert line["hbm_bytes_high"] == traffic("tiled-v2", PROBLEM, l2_bytes=DEVICE.l2_bytes, schedule=schedule).high


@pytest.mark.parametrize("down", [True, False])
def test_the_way_in_which_blocks_walked_counts_before_that_of_the_schedule(tmp_path: Path, down: bool) -> None:
    causal = dataclasses.replace(PROBLEM, batch=1, seq_q=16384, seq_kv=16384, mask="causal")
    launch = {"block_q": 64, "block_kv": 64, "walks_down": down}
    line = derived(tmp_path, (row(problem=causal, launch=launch), [2.0] * 20)).iloc[0]
    device = {"l2_bytes": DEVICE.l2_bytes, "sm_count": DEVICE.sm_count, "l2_partitions": 2}
    same, other = (
        traffic("tiled-v2", causal, schedule=Schedule(64, 64, walks_down=way), **device) for way in (down, not down)
    )
    assert line["hbm_bytes"] == same.estimate != other.estimate


def test_a_provider_whose_algorithm_is_not_known_has_rates_but_no_bytes(tmp_path: Path) -> None:
    line = derived(tmp_path, (row("mine"), [2.0] * 20)).iloc[0]
    assert line["tflops"] > 0
    assert line[["hbm_bytes", "intensity", "hbm_gbps"]].isna().all()


def test_a_mode_that_the_algorithm_does_not_have_has_no_bytes(tmp_path: Path) -> None:
    summary = summarise(visits(tmp_path, (row(problem=dataclasses.replace(PROBLEM, mode="backward")), [2.0] * 20)))
    line = derive(summary, DEVICE, A100, models={"flash-v2": ("decode", Schedule())}).iloc[0]
    assert pd.isna(line["hbm_bytes"])
    assert line["tflops"] > 0


def test_executed_work_is_known_where_the_launch_says_the_tiles(tmp_path: Path) -> None:
    launch = {"block_q": 128, "block_kv": 64}
    line = derived(tmp_path, (row(launch=launch), [2.0] * 20)).iloc[0]
    assert line["executed_flops"] > line["flops"]
    assert pd.isna(derived(tmp_path, (row("naive"), [2.0] * 20)).iloc[0]["executed_flops"])


def test_a_device_that_the_catalogue_does_not_know_has_no_share_of_a_peak(tmp_path: Path) -> None:
    line = derive(summarise(visits(tmp_path, (row(), [2.0] * 20))), DEVICE, None).iloc[0]
    assert pd.isna(line["percent_of_peak"])
    assert line["tflops"] > 0


def test_peak_memory_stands_with_and_without_the_inputs(tmp_path: Path) -> None:
    # ME-02: inputs of 1 GB, 0.5 GB beside them
    line = derived(tmp_path, (row(memory=Memory(1_000_000_000, 1_500_000_000)), [1.0] * 20)).iloc[0]
    assert line["peak_bytes"] == 1_500_000_000
    assert line["peak_net_bytes"] == 500_000_000


def test_both_memory_figures_are_of_the_round_that_took_most(tmp_path: Path) -> None:
    first, second = row(memory=Memory(100, 150)), row(number=1, memory=Memory(10, 120))
    line = derived(tmp_path, (first, [1.0] * 20), (second, [1.0] * 20)).iloc[0]
    assert (line["before_bytes"], line["peak_bytes"], line["peak_net_bytes"]) == (10, 120, 110)


def test_a_faster_provider_has_a_speed_up_above_one(tmp_path: Path) -> None:
    # GA-14
    rows = derived(tmp_path, (row("naive"), [4.0] * 20), (row(), [1.0] * 20), reference="naive")
    assert rows.set_index("provider")["speedup"].to_dict() == {"naive": 1.0, "flash-v2": 4.0}


def test_speed_ups_compare_the_same_problem_only(tmp_path: Path) -> None:
    other = dataclasses.replace(PROBLEM, dtype="fp16")
    rows = derived(tmp_path, (row("naive", other), [4.0] * 20), (row(), [1.0] * 20), reference="naive")
    assert pd.isna(rows.set_index("provider")["speedup"]["flash-v2"])


def test_speed_ups_over_a_reference_that_failed_are_unknown(tmp_path: Path) -> None:
    rows = derived(
        tmp_path, (row("naive", status="oom", reason="too large"), []), (row(), [1.0] * 20), reference="naive"
    )
    assert rows["speedup"].isna().all()
    assert rows["reference"].tolist() == [None, None]


def test_a_mistyped_reference_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'naive'"):
        derived(tmp_path, (row("naive"), [4.0] * 20), reference="naiv")


@pytest.mark.parametrize(
    "status", ["checked", "unsupported", "oom", "incorrect", "invalid", "timeout", "crashed", "error"]
)
def test_a_case_that_is_not_ok_has_no_derived_number(tmp_path: Path, status: Status) -> None:
    # IO-03, GA-13: one such row among others neither stops the rest nor gets a 0
    rows = derived(tmp_path, (row("naive", status=status, reason="why"), []), (row(), [1.0] * 20))
    by_provider = rows.set_index("provider")
    for metric in METRICS:
        if metric.compute is not None:
            assert pd.isna(by_provider[metric.name]["naive"])
    assert by_provider["status"]["naive"] == status
    assert by_provider["time_ms"]["flash-v2"] == 1.0


def test_the_time_is_the_median_of_the_rounds_medians(tmp_path: Path) -> None:
    line = derived(tmp_path, *((row(number=n), [float(n + 1)] * 20) for n in range(3))).iloc[0]
    assert line["rounds"] == 3
    assert line["time_ms"] == 2.0
    assert line["rounds_sd"] == 0.5  # 1 ms over 2 ms
    assert line["sample_count"] == 60


def test_the_spread_is_that_inside_a_round_not_between_rounds(tmp_path: Path) -> None:
    line = derived(tmp_path, *((row(number=n), [float(n + 1)] * 20) for n in range(3))).iloc[0]
    assert line["spread"] == 0.0


def test_six_rounds_give_an_interval_over_rounds(tmp_path: Path) -> None:
    # the extremes of six enclose the median with 96.9 %
    line = derived(tmp_path, *((row(number=n), [1 + n / 100] * 20) for n in range(6))).iloc[0]
    assert (line["time_low_ms"], line["time_high_ms"]) == pytest.approx((1.0, 1.05))


def test_fewer_rounds_give_the_hull_of_their_own_intervals(tmp_path: Path) -> None:
    line = derived(tmp_path, *((row(number=n), [1.0 + n, 1.25 + n] * 10) for n in range(2))).iloc[0]
    assert (line["time_low_ms"], line["time_high_ms"]) == (1.0, 2.25)


def test_a_single_sample_has_a_time_and_no_spread(tmp_path: Path) -> None:
    # TI-06
    line = derived(tmp_path, (row(), [1.0])).iloc[0]
    assert line["time_ms"] == 1.0
    assert line[["spread", "time_low_ms", "time_high_ms", "rounds_sd"]].isna().all()
    assert "too few samples for a spread" in line["remarks"]


def test_an_ok_row_without_samples_has_no_time_and_says_so(tmp_path: Path) -> None:
    # TI-06
    line = derived(tmp_path, (row(), [])).iloc[0]
    assert line[["time_ms", "tflops"]].isna().all()
    assert "no samples" in line["remarks"]


def test_times_in_two_groups_are_remarked(tmp_path: Path) -> None:
    line = derived(tmp_path, (row(), [1.0, 1.2] * 20)).iloc[0]
    assert "the times fall into two groups" in line["remarks"]


def test_a_rate_above_the_hbm_roof_is_kept_and_remarked(tmp_path: Path) -> None:
    # BY-05: about 16 MB in 3 us are 5.3 TB/s, on a card with 1.9 TB/s and a 40 MiB L2
    small = Problem(8, 16, 16, 128, 128, 128, 128, "bf16")
    line = derived(tmp_path, (row(problem=small), [0.003] * 20)).iloc[0]
    assert line["hbm_gbps"] > 5000
    remarks = " | ".join(line["remarks"])
    assert "cache resident" in remarks
    assert "above the spec HBM roof" in remarks


def test_a_row_above_a_measured_ceiling_asks_for_a_new_ceiling(tmp_path: Path) -> None:
    slow = Ceiling("compute", "bf16", "gemm", 10.0, "TFLOP/s", "measured", "isolated")
    line = derived(tmp_path, (row(), [2.0] * 20), ceilings=(slow,)).iloc[0]
    assert "measure the ceilings again" in " | ".join(line["remarks"])
    assert line["percent_of_ceiling"] > 100


def test_an_ordinary_row_has_no_remarks_and_a_binding_ceiling(tmp_path: Path) -> None:
    line = derived(tmp_path, (row(), [1.0] * 20)).iloc[0]
    assert line["remarks"] == ()
    assert line["binding"] == "compute"


def test_the_launch_and_the_waves_of_a_kernel_whose_tiles_are_known_are_weighed_too(tmp_path: Path) -> None:
    empty = Ceiling("launch", None, "empty", 2.0, "us", "measured", "isolated")
    tiny = Problem(1, 4, 4, 256, 256, 64, 64, "bf16")
    launched = row(problem=tiny, launch={"block_q": 64, "block_kv": 64})
    line = derived(tmp_path, (launched, [0.005] * 20), ceilings=(empty,)).iloc[0]
    assert line["binding"] == "occupancy"
    assert line["explanation"].startswith(
        "85% of the SM time has no block to run [16 blocks in 1 wave(s) of 108] (launch 40%"
    )


def test_a_case_is_as_good_as_its_worst_round(tmp_path: Path) -> None:
    rows = [(row(number=n), [1.0] * 20) for n in range(2)]
    line = derived(tmp_path, *rows, (row(number=2, status="crashed", reason="signal 11"), [])).iloc[0]
    assert line["status"] == "crashed"
    assert line["reason"] == "in 1 of 3 rounds: signal 11"
    assert pd.isna(line["time_ms"])


def test_what_was_recorded_is_put_together_over_rounds(tmp_path: Path) -> None:
    check = Check("out", 1e-3, 0.01, 4e-3, 0.04, 1e-3, 0.01, "float64")
    first = row(warnings=("a",), check=check, state=State((1300, 1410), power_w=200.0, throttle_reasons=("power_cap",)))
    worse = dataclasses.replace(check, error_norm=2e-3)
    second = row(number=1, warnings=("a", "b"), check=worse, state=State((1200, 1400), power_w=300.0))
    line = derived(tmp_path, (first, [1.0] * 20), (second, [1.0] * 20)).iloc[0]
    assert line["warnings"] == ("a", "b")
    assert line["error_norm"] == 2e-3
    assert (line["sm_clock_low_mhz"], line["sm_clock_high_mhz"]) == (1200, 1410)
    assert line["power_w"] == 250.0
    assert line["throttle_reasons"] == ("power_cap",)


def test_two_runs_of_one_case_stay_two_lines(tmp_path: Path) -> None:
    first = visits(tmp_path / "a", (row(), [1.0] * 20)).assign(run="one")
    second = visits(tmp_path / "b", (row(), [2.0] * 20)).assign(run="two")
    rows = derive(summarise(pd.concat([first, second])), DEVICE, A100)
    assert rows.set_index("run")["time_ms"].to_dict() == {"one": 1.0, "two": 2.0}


def test_no_visits_give_an_empty_frame_with_all_columns(tmp_path: Path) -> None:
    rows = derived(tmp_path)
    assert len(rows) == 0
    assert {metric.name for metric in METRICS} <= set(rows.columns)


def test_every_metric_has_one_name() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
