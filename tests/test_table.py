"""Rows as text: a reader never takes a missing value for a measured one, and a file gives back what was written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.analysis.metrics import derive, summarise
from flashbench.errors import UsageError
from flashbench.hardware.catalogue import get
from flashbench.model.schedule import Schedule
from flashbench.records import Case, Check, Device, Memory, Problem, Row, Timing
from flashbench.report import table
from flashbench.report.columns import comparison, number, ratio
from flashbench.store.frame import frame
from flashbench.store.read import load_run
from flashbench.store.run import RunWriter

DEVICE = Device("cuda", "NVIDIA A100 80GB PCIe", 85_000_000_000, sm_count=108, l2_bytes=40 * 2**20)
CHECK = Check("out", 2.05e-3, 0.0156, 8.4e-3, 0.06, 2e-3, 0.0155, "float64")
LENGTHS = (16384, 128, 1024, 512)


def problem(seq_len: int) -> Problem:
    return Problem(1, 16, 16, seq_len, seq_len, 128, 128, "bf16")


@pytest.fixture
def rows(tmp_path: Path) -> pd.DataFrame:
    """Naive and flash at four lengths out of order; naive ran out of memory at the longest."""
    with RunWriter.create(tmp_path, "a100-pcie-80gb", "test", {}) as writer:
        for seq_len in LENGTHS:
            timing = Timing("events", "cold", "isolated", 20, 100.0)
            if seq_len == 16384:
                writer.append(Row(Case("naive", problem(seq_len)), 0, "oom", "wanted 8.0 GiB [of 79.2]"))
            else:
                case = Case("naive", problem(seq_len))
                writer.append(Row(case, 0, "ok", timing=timing, check=CHECK), [seq_len / 250] * 20)
            case = Case("flash-v2", problem(seq_len))
            memory = Memory(2**30, 2**30 + 512 * 2**20)
            writer.append(Row(case, 0, "ok", timing=timing, check=CHECK, memory=memory), [seq_len / 1000] * 20)
    summary = summarise(frame(load_run(tmp_path)))
    models = {"naive": ("materialised", Schedule()), "flash-v2": ("tiled-v2", Schedule())}
    return derive(summary, DEVICE, get("a100-pcie-80gb"), models=models, reference="naive")


def cells(text: str) -> list[dict[str, str]]:
    """The lines of a Markdown table by heading."""
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def rendered(rows: pd.DataFrame, terminal: int = 300, **more: Any) -> str:
    from rich.console import Console

    console = Console(width=terminal, file=io.StringIO(), record=True)
    console.print(table.table(rows, **more))
    return console.export_text()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


# For readers


def test_the_default_columns_show_units_in_their_headings(rows: pd.DataFrame) -> None:
    assert list(cells(table.markdown(rows))[0]) == [
        "provider",
        "problem",
        "status",
        "time (ms)",
        "spread (%)",
        "rate (TFLOP/s)",
        "of spec peak (%)",
        "speed-up over naive",
        "error",
        "net memory (MiB)",
        "HBM bytes, modelled (GB) [low, high]",
        "intensity (FLOP/byte)",
    ]


def test_a_row_without_a_time_shows_a_dash_and_its_reason(rows: pd.DataFrame) -> None:
    # IO-03, GA-13
    text = table.markdown(rows)
    line = next(line for line in cells(text) if line["status"] == "oom (2)")
    assert "\n(2) wanted 8.0 GiB [of 79.2]\n" in text
    assert line["time (ms)"] == line["rate (TFLOP/s)"] == line["speed-up over naive"] == "-"


def test_no_cell_reads_nan_none_or_zero_for_a_missing_value(rows: pd.DataFrame) -> None:
    every = [str(name) for name in rows.columns if name != "samples_ms"]
    oom = next(line for line in cells(table.markdown(rows, every)) if line["status"].startswith("oom"))
    assert not {"nan", "NaN", "None", "<NA>", "0.00"} & set(oom.values())


def test_lengths_stand_in_numeric_order(rows: pd.DataFrame) -> None:
    # IO-06
    lengths = [line["seq_q"] for line in cells(table.markdown(rows, ["seq_q"]))]
    assert lengths == ["128", "128", "512", "512", "1024", "1024", "16384", "16384"]


def test_figures_are_shown_in_the_unit_of_the_heading(rows: pd.DataFrame) -> None:
    line = next(x for x in cells(table.markdown(rows)) if x["provider"] == "flash-v2" and "s1024" in x["problem"])
    assert line["time (ms)"] == "1.024"
    assert line["net memory (MiB)"] == "512.0"
    assert line["error"] == "0.0021"
    assert line["speed-up over naive"] == "4.00x"
    low = 4 * 16 * 1024 * 128 * 2 / 1e9  # Q, K, V and O once, in decimal GB
    assert f"[{low:.4f}, " in line["HBM bytes, modelled (GB) [low, high]"]


def test_the_terminal_table_says_what_the_markdown_says(rows: pd.DataFrame) -> None:
    text = rendered(rows)
    for line in cells(table.markdown(rows)):
        for cell in line.values():
            assert cell in text


def test_brackets_in_a_reason_are_not_taken_for_markup(rows: pd.DataFrame) -> None:
    marked = rows.assign(reason="[bold]not bold[/bold] [/]")
    assert "[bold]not bold[/bold] [/]" in rendered(marked)


def test_bars_and_line_ends_in_a_reason_leave_the_markdown_table_whole(rows: pd.DataFrame) -> None:
    text = table.markdown(rows.assign(reason="a | b\nc"), ["provider", "reason"])
    assert all(line.replace("\\|", "").count("|") == 3 for line in text.splitlines())


def test_what_must_be_known_of_rows_stands_once_below_the_table(rows: pd.DataFrame) -> None:
    text = table.markdown(rows.assign(warnings=[("differs from call to call",)] * len(rows)))
    assert cells(text)[0]["status"] == "ok (1, 2)"
    assert text.count("(1) differs from call to call") == 1
    assert text.count("(2) cache resident") == 1


@pytest.mark.parametrize("width", range(60, 160, 7))
def test_a_narrow_terminal_drops_whole_columns_and_says_which(rows: pd.DataFrame, width: int) -> None:
    text = rendered(rows, terminal=width, width=width)
    assert "…" not in text
    left_out = " ".join(text.split()).partition(f"not shown in {width} characters: ")[2]
    line = next(x for x in cells(table.markdown(rows)) if x["provider"] == "flash-v2" and "s1024" in x["problem"])
    for heading, cell in line.items():
        assert (cell in text) != (heading in left_out)


def test_an_unknown_column_names_the_nearest(rows: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match="did you mean 'tflops'"):
        table.markdown(rows, ["tflop"])


def test_columns_are_chosen_by_name_and_all_means_every_one(rows: pd.DataFrame) -> None:
    assert table.chosen(rows, None) is None
    assert table.chosen(rows, "provider, time_ms") == ("provider", "time_ms")
    assert set(table.chosen(rows, "all") or ()) == {*rows.columns} - {"samples_ms"}
    with pytest.raises(UsageError, match="did you mean 'time_ms'"):
        table.chosen(rows, "provider,time_m")
    with pytest.raises(UsageError, match="no column"):
        table.chosen(rows, " , ")


def test_a_table_that_is_not_printed_on_a_terminal_is_whole(
    rows: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    table.print_table(rows)
    text = capsys.readouterr().out
    assert "speed-up" in text
    assert "intensity" in text
    assert "not shown" not in text


def test_samples_are_no_column(rows: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match="samples_ms"):
        table.markdown(rows, ["samples_ms"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0.000"),
        (0.0423, "0.04230"),
        (1.0, "1.000"),
        (412.53, "412.5"),
        (12345.6, "12,346"),
        (2.1e-5, "2.10e-05"),
        (-0.5, "-0.5000"),
    ],
)
def test_a_number_has_four_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e12, 1e12))
def test_a_shown_number_is_the_number_to_its_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(
        value, rel=6e-3 if abs(value) < 1e-4 or abs(value) >= 1e9 else 6e-4
    )


def test_a_speed_up_of_four_reads_four_times_and_less_time() -> None:
    # GA-14
    assert ratio(4.0) == "4.00x"
    assert comparison(4.0, 1.0) == "4.00x faster (time -75.0 %)"
    assert comparison(1.0, 4.0) == "4.00x slower (time +300.0 %)"
    assert comparison(1.0, 1.0) == "as fast (time +0.0 %)"


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_word_and_sign_of_a_comparison_agree_and_no_time_falls_below_nothing(base: float, new: float) -> None:
    # GA-14
    text = comparison(base, new)
    percent = float(text.split("(time ")[1].split(" %")[0])
    assert percent >= -100
    assert ("faster" in text) == (new < base)
    assert ("slower" in text) == (new > base)
    if text[0].isdigit():
        assert float(text.split("x")[0]) >= 1


# For files


def test_csv_gives_back_every_bit(rows: pd.DataFrame) -> None:
    # IO-07: 0.0423 ms is not 0.0
    changed = rows.assign(time_ms=[0.0423, 1 / 3, 1e-9, 12345.678901234567, *[float("nan")] * 4])
    again = table.parse_csv(table.csv(changed, ["key", "time_ms"])).set_index("key")["time_ms"]
    expected = changed.set_index("key")["time_ms"]
    assert again.reindex(expected.index).tolist()[:4] == expected.tolist()[:4]
    assert again.isna().sum() == 4


def test_text_that_reads_like_missing_survives_csv(rows: pd.DataFrame) -> None:
    # IO-01
    odd = rows.assign(mask="None", backend="null", note=["NA", "nan", "007", "1e5", "", 'a "b", c', "line\nend", None])
    first = table.csv(odd)
    frame_again = table.parse_csv(first)
    assert frame_again["mask"].tolist() == ["None"] * 8
    assert frame_again["backend"].tolist() == ["null"] * 8
    assert table.csv(frame_again) == first


def test_integers_are_integers_in_csv(rows: pd.DataFrame) -> None:
    # IO-06: no "1024.0"
    text = table.csv(rows)
    read = list(csv.DictReader(io.StringIO(text)))
    assert [line["seq_q"] for line in read] == ["128", "128", "512", "512", "1024", "1024", "16384", "16384"]
    assert {line["page_size"] for line in read} == {""}
    assert str(table.parse_csv(text)["seq_q"].dtype) == "Int64"


def test_an_unknown_value_is_an_empty_cell(rows: pd.DataFrame) -> None:
    line = next(x for x in csv.DictReader(io.StringIO(table.csv(rows))) if x["status"] == "oom")
    assert line["time_ms"] == line["tflops"] == line["error_norm"] == line["launch"] == ""


def test_csv_of_chosen_columns_holds_the_fields_behind_them(rows: pd.DataFrame) -> None:
    header = table.csv(rows, ["provider", "hbm_bytes"]).splitlines()[0]
    assert header == "provider,hbm_bytes_low,hbm_bytes,hbm_bytes_high"


def test_json_is_json_for_every_reader(rows: pd.DataFrame) -> None:
    # IO-02
    changed = rows.assign(error_norm=float("inf"), tflops=float("nan"))
    plain = json.loads(table.json(changed), parse_constant=refuse)
    assert len(plain) == 8
    assert plain[0]["error_norm"] is None
    assert plain[0]["seq_q"] == 128
    oom = next(line for line in plain if line["status"] == "oom")
    assert (oom["time_ms"], oom["reason"]) == (None, "wanted 8.0 GiB [of 79.2]")


def test_an_empty_run_gives_headings_only(rows: pd.DataFrame) -> None:
    none = rows.iloc[:0]
    assert len(table.markdown(none).splitlines()) == 2
    assert len(table.csv(none).splitlines()) == 1
    assert json.loads(table.json(none)) == []
