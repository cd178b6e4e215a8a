"""Counters: ncu's answers as it prints them, its refusals in one line each, and the model's error beside what was counted."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashbench.analysis.counted import compare
from flashbench.cli import counters as cli
from flashbench.errors import FlashbenchError, StoreError, UsageError
from flashbench.model.schedule import Schedule
from flashbench.model.traffic import traffic
from flashbench.providers.table import get
from flashbench.records import Case, Device, from_plain
from flashbench.run import nsight
from flashbench.run.counters import count_cases
from flashbench.store import counters as store
from flashbench.store.counters import Counted

H200 = Device("cuda", "NVIDIA H200", 150_754_820_096, index=0, capability=(9, 0), sm_count=132, l2_bytes=62_914_560)
FLASH = Case.from_key("sdpa-flash forward bf16 b1 h16 s16384 d128")
MODEL = (get("sdpa-flash").algorithm, get("sdpa-flash").schedule)

# The raw page of `ncu --csv --page raw --print-units base` over one range, as 2025.3 lays it out: the tool's own lines, a header,
# a line of units, a line for each result. Numbers have separators; 'n/a' stands for what could not be collected.
HEADER = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'
RANGE = '"0","4711","python3.12","127.0.0.1","range","1","0","","","0","9.0"'
RAW = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "range": Application replay pass 1
==PROF== Disconnected from process 4711
==PROF== Creating report from application replay data: 0%....50%....100% - 2 passes
{HEADER},"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","lts__t_bytes.sum","sm__inst_executed_pipe_tensor_op_gmma.sum"
"","","","","","","","","","","","byte","byte","ns","byte","inst"
{RANGE},"201,421,312","40,263,680","2,512,384","17,448,304,640","n/a"
"""
DENIED = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
"""


def counted(read: float, written: float, case: Case = FLASH, **more: object) -> Counted:
    return Counted(case, "ok", dram_read_bytes=read, dram_write_bytes=written, **more)  # type: ignore[arg-type]


def test_every_counter_is_read_from_the_raw_page_in_base_units() -> None:
    (result,) = nsight.read_csv(RAW)
    assert result == {
        "dram__bytes_read.sum": 201_421_312,
        "dram__bytes_write.sum": 40_263_680,
        "gpu__time_duration.sum": 2_512_384,
        "lts__t_bytes.sum": 17_448_304_640,
        "sm__inst_executed_pipe_tensor_op_gmma.sum": None,
    }


def test_units_that_ncu_chooses_itself_are_converted() -> None:
    text = RAW.replace('"byte","byte","ns","byte","inst"', '"Mbyte","Kbyte","us","Gbyte","inst"')
    (result,) = nsight.read_csv(text.replace("201,421,312", "201.42").replace("2,512,384", "2,512.38"))
    assert result["dram__bytes_read.sum"] == pytest.approx(201.42e6)
    assert result["gpu__time_duration.sum"] == pytest.approx(2.51238e6)


def test_a_unit_that_is_not_known_is_no_number() -> None:
    with pytest.raises(FlashbenchError, match="'sector'"):
        nsight.read_csv(RAW.replace('"byte","byte","ns"', '"sector","byte","ns"'))


@pytest.mark.parametrize("text", ["", DENIED, HEADER, "==WARNING== No ranges were profiled."])
def test_output_without_a_table_is_said_to_have_none(text: str) -> None:
    with pytest.raises(FlashbenchError, match="no table"):
        nsight.read_csv(text)


def test_a_kernel_name_with_commas_and_quotes_does_not_shift_the_columns() -> None:
    (result,) = nsight.read_csv(RAW.replace('"range"', '"void f<a, b>(""x"", int)"'))
    assert result["dram__bytes_write.sum"] == 40_263_680


@pytest.mark.parametrize(
    ("listing", "names"),
    [
        (["sm__inst_executed_pipe_tensor", "sm__inst_executed_pipe_tensor_op_hmma"], ["sm__inst_executed_pipe_tensor"]),
        (
            [
                "sm__inst_executed_pipe_tensor_op_gmma",
                "sm__inst_executed_pipe_tensor_op_hmma",
                "sm__inst_executed_pipe_tensor_op_imma",
            ],
            ["sm__inst_executed_pipe_tensor_op_gmma", "sm__inst_executed_pipe_tensor_op_hmma"],
        ),
        (["sm__inst_executed_pipe_tensor_op_hmma_type_hfma2"], []),
    ],
)
def test_the_tensor_counters_are_the_ones_that_this_gpu_lists(listing: list[str], names: list[str]) -> None:
    text = "Device NVIDIA H200 (GH100)\n" + "\n".join(f"{n:<60} Counter  inst  # of warp instructions" for n in listing)
    assert nsight.tensor_names(text) == tuple(f"{name}.sum" for name in names)


def test_clocks_and_caches_are_left_alone_and_the_whole_call_is_one_range() -> None:
    words = nsight.command("ncu", ["a", "b"], Path("log"), ["python3", "-m", "child"])
    text = " ".join(words)
    for option in (
        "--clock-control none",
        "--cache-control none",
        "--replay-mode app-range",
        "--metrics a,b",
        "--print-units base",
    ):
        assert option in text
    assert words[-3:] == ["python3", "-m", "child"]


CUDNN = Case.from_key("sdpa-cudnn forward bf16 b1 h16 s16384 d128")


def fake_ncu(folder: Path, *children: tuple[str, Sequence[Mapping[str, object]]]) -> str:
    """A program that answers as ncu did: at each start the next child's log where --log-file says, and its lines on stdout."""
    for number, (log, answers) in enumerate(children):
        (folder / f"log{number}").write_text(log)
        (folder / f"out{number}").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    path = folder / "ncu"
    path.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do if [ "$1" = --log-file ]; then target=$2; fi; shift; done\n'
        f'cd "{folder}"; n=$(ls started* 2>/dev/null | wc -l); touch started$n\n'
        'cp log$n "$target"; cat out$n\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def counts(ncu: str, *cases: Case) -> list[Counted]:
    return list(count_cases(ncu, (), cases, H200, 0, lambda _case: None))


def ok(case: Case, **more: object) -> dict[str, object]:
    return {"key": case.key, "status": "ok", **more}


TWO = RAW + RANGE.replace('"0"', '"1"', 1) + ',"1,000","2,000","3,000","4,000","5"\n'


def test_one_case_becomes_its_counters_and_what_ran(tmp_path: Path) -> None:
    (found,) = counts(fake_ncu(tmp_path, (RAW, [ok(FLASH, backend="flash", launch={"block_q": 128})])), FLASH)
    assert (found.status, found.dram_read_bytes, found.dram_write_bytes) == ("ok", 201_421_312, 40_263_680)
    assert found.time_ms == pytest.approx(2.512384)
    assert (found.backend, found.launch) == ("flash", {"block_q": 128})
    assert found.tensor_instructions is None


def test_cases_of_one_child_get_its_results_in_their_order(tmp_path: Path) -> None:
    passes = [ok(FLASH), ok(CUDNN)] * 2
    first, second = counts(fake_ncu(tmp_path, (TWO, passes)), FLASH, CUDNN)
    assert (first.case, first.dram_read_bytes) == (FLASH, 201_421_312)
    assert (second.case, second.dram_read_bytes) == (CUDNN, 1_000)


def test_a_case_without_a_range_takes_no_result_of_another(tmp_path: Path) -> None:
    refused = {"key": FLASH.key, "status": "unsupported", "reason": "no such kernel"}
    first, second = counts(fake_ncu(tmp_path, (RAW, [refused, ok(CUDNN)])), FLASH, CUDNN)
    assert (first.status, first.reason) == ("unsupported", "no such kernel")
    assert (second.status, second.dram_read_bytes) == ("ok", 201_421_312)


def test_what_a_crash_took_along_is_counted_alone(tmp_path: Path) -> None:
    crash: tuple[str, list[dict[str, object]]] = (
        "==ERROR== The application returned an error code (139).",
        [ok(FLASH)],
    )
    alone = (RAW, [ok(FLASH)])
    first, second = counts(fake_ncu(tmp_path, crash, alone, (crash[0], [])), FLASH, CUDNN)
    assert (first.status, first.dram_read_bytes) == ("ok", 201_421_312)
    assert second.status == "error"
    assert "error code (139)" in str(second.reason)


def test_results_that_do_not_match_the_cases_are_given_to_none(tmp_path: Path) -> None:
    each = [ok(FLASH), ok(CUDNN)]
    alone = [(RAW, each[:1]), (RAW, each[1:])]
    first, second = counts(fake_ncu(tmp_path, (RAW, each), *alone), FLASH, CUDNN)
    assert first.status == second.status == "ok"
    assert len(list(tmp_path.glob("started*"))) == 3


def test_a_case_that_fails_keeps_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    failed = {"key": FLASH.key, "status": "oom", "reason": "ran out of memory"}
    first, second = counts(fake_ncu(tmp_path, (RAW, [failed, ok(CUDNN)])), FLASH, CUDNN)
    assert (first.status, first.reason) == ("oom", "ran out of memory")
    assert second.status == "ok"


def test_a_range_that_was_not_profiled_is_an_error_in_ncus_own_words(tmp_path: Path) -> None:
    (found,) = counts(fake_ncu(tmp_path, ("==WARNING== No ranges were profiled.", [ok(FLASH)])), FLASH)
    assert found.status == "error"
    assert "No ranges were profiled" in str(found.reason)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (DENIED, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "sandbox"),
    ],
)
def test_without_permission_one_line_says_what_to_allow(tmp_path: Path, log: str, words: str) -> None:
    ncu = fake_ncu(tmp_path, (log, [ok(FLASH)]))
    with pytest.raises(nsight.CountersUnavailable, match=words) as refused:
        counts(ncu, FLASH)
    assert refused.value.exit_code == 3
    assert "\n" not in str(refused.value)


def test_without_the_tool_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nsight.CountersUnavailable, match="nsight-compute") as absent:
        nsight.find_ncu()
    assert absent.value.exit_code == 3


def test_counters_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / store.FILE
    store.create(path, {"device": H200, "ncu": "2025.3.1"})
    kept = counted(2e8, 4e7, tensor_instructions={"sm__inst_executed_pipe_tensor.sum": 5.0}, launch={"block_q": 64})
    absent = Counted(FLASH, "unsupported", "no such backend")
    for one in (kept, absent):
        store.append(path, one)
    header, found = store.load(path.parent)
    assert header["ncu"] == "2025.3.1"
    assert found == (kept, absent)


@pytest.mark.parametrize("text", ["", "nonsense", '{"schema": 1}\n{"key": "nonsense"}', '{"schema": 99}'])
def test_a_damaged_or_newer_file_is_a_store_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / store.FILE
    path.write_text(text)
    with pytest.raises(StoreError, match=store.FILE.replace(".", "[.]")):
        store.load(path)


def moved() -> tuple[int, int]:
    provider = get(FLASH.provider)
    model = compare(counted(1, 1), H200, (provider.algorithm, provider.schedule)).model
    assert model is not None
    return model.read, model.written


def test_the_models_error_is_that_of_its_reads() -> None:
    read, written = moved()
    assert compare(counted(read / 1.04, written), H200, MODEL).read_error == pytest.approx(0.04)
    assert compare(counted(read, written), H200, MODEL).read_error == pytest.approx(0)


def test_writes_that_stay_in_the_l2_are_no_disagreement() -> None:
    read, written = moved()
    some_dirty, too_many = (compare(counted(read, w), H200, MODEL) for w in (written - 50e6, written * 1.1))
    assert (some_dirty.writes_agree, some_dirty.inside) == (True, True)
    assert too_many.writes_agree is False


def test_missing_writes_beyond_what_the_l2_holds_are_a_disagreement() -> None:
    case = Case.from_key("naive forward bf16 b1 h16 s16384 d128")
    model = traffic("materialised", case.problem, l2_bytes=H200.l2_bytes, sm_count=H200.sm_count)
    found = compare(counted(model.read, model.written * 0.8, case), H200, ("materialised", Schedule()))
    assert found.writes_agree is False


def test_bytes_beyond_no_reuse_lie_outside_of_the_interval() -> None:
    high = traffic("tiled-v2", FLASH.problem, l2_bytes=H200.l2_bytes, sm_count=H200.sm_count).high
    assert compare(counted(1.2 * high, moved()[1]), H200, MODEL).inside is False


def test_a_provider_without_a_model_has_counters_and_no_error() -> None:
    found = compare(counted(1e8, 1e7), H200, None)
    assert (found.model, found.read_error, found.inside) == (None, None, None)


REFERENCE = Path(__file__).parents[1] / "results" / "reference" / "h200-sxm-141gb"

# The model is held to 5 % of the bytes that an H200 read and wrote, but for these, whose error (a little above it) is all that is
# promised. None: the model has no account of it.
ALLOWED = 0.05
LOOSE: dict[str, tuple[float | None, float | None]] = {
    # FlashAttention-2's causal blocks do not keep the pace that the replay gives them, and it writes more than its output.
    "sdpa-flash forward bf16 b4 h16 s4096 d128 causal": (0.05, 0.08),
    "sdpa-flash forward bf16 b1 h16 s16384 d128 causal": (0.15, 0.13),
    "sdpa-flash forward bf16 b1 h16 s16384 d128": (0.02, 0.105),
    "sdpa-flash backward bf16 b1 h16 s16384 d128 causal": (0.04, None),
    # One head: blocks drift apart over long rows, on some days more than on others.
    "sdpa-flash forward bf16 b1 h1 s131072 d128": (0.10, 0.14),
    "sdpa-flash forward bf16 b1 h1 s524288 d128": (0.45, None),
    "sdpa-cudnn forward bf16 b1 h1 s524288 d128": (0.14, None),
    "flash-v2 forward bf16 b1 h1 s524288 d128": (0.38, 0.05),
    # The memory-efficient kernel passes its sums of dQ through memory more often than the three kernels of the model.
    **{
        f"sdpa-efficient backward bf16 {problem}": bounds
        for problem, bounds in {
            "b4 h16 s4096 d128": (0.12, None),
            "b1 h16 s16384 d128": (0.48, None),
            "b4 h16 s4096 d128 causal": (0.05, None),
            "b1 h16 s16384 d128 causal": (0.32, None),
        }.items()
    },
    # The library reads its operands more than once; the model of a product alone does not know its tiles.
    "gemm-qk forward bf16 b2 h16 s8192 d128": (0.36, 0.05),
    # A share of next to nothing.
    **{
        f"{provider} decode bf16 {problem}": (0.01, None)
        for provider in ("flash-decode", "sdpa-cudnn", "sdpa-flash")
        for problem in ("b16 h32/8 s1/8192 d128", "b64 h32/8 s1/8192 d128")
    },
}


def reference(*folders: str) -> dict[str, tuple[Counted, Device]]:
    found: dict[str, tuple[Counted, Device]] = {}
    for folder in folders:
        header, cases = store.load(REFERENCE / folder)
        found |= {one.case.key: (one, from_plain(Device, header["device"])) for one in cases}
    return found


COUNTED = reference("counters", "counters-kernels", "counters-one-head")
"""PyTorch's kernels, this project's, and flash-v2 on one long head, in the block shape that is kept for such."""


@pytest.mark.parametrize("key", COUNTED)
def test_the_model_holds_to_the_bytes_that_were_counted_on_an_h200(key: str) -> None:
    assert_holds(*COUNTED[key], *LOOSE.get(key, (ALLOWED, ALLOWED)))


def assert_holds(one: Counted, device: Device, reads: float | None, writes: float | None) -> None:
    provider = get(one.case.provider)
    found = compare(one, device, (provider.algorithm, provider.schedule))
    assert found.inside is True
    assert found.read_error == pytest.approx(0, abs=reads)
    if writes is not None:
        assert found.model is not None
        assert one.dram_write_bytes is not None
        dirty = min(max(0.0, found.model.written - one.dram_write_bytes), device.l2_bytes or 0)
        assert (one.dram_write_bytes + dirty) / found.model.written == pytest.approx(1, abs=writes)


def test_every_loose_bound_belongs_to_a_case_that_was_counted() -> None:
    assert set(LOOSE) <= set(COUNTED)


def run(*arguments: str) -> str:
    app = typer.Typer()
    cli.register(app)
    app.command("other")(lambda: None)  # with one command alone typer takes no name
    done = CliRunner().invoke(app, ["counters", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def stored(tmp_path: Path) -> Path:
    path = tmp_path / store.FILE
    store.create(path, {"device": H200})
    read, written = moved()
    store.append(path, counted(read / 0.96, written))
    store.append(path, Counted(Case("sdpa-cudnn", FLASH.problem), "error", "it broke"))
    return path


def test_stored_counters_are_printed_beside_the_model_without_a_gpu(tmp_path: Path) -> None:
    text = run("--show", str(stored(tmp_path)))
    assert "-4.0%" in text
    assert "read, counted" in text
    assert "read, modelled" in text
    assert "it broke" in text
    assert "1 of 1 cases lie inside the model's interval" in text


def test_json_keeps_measured_and_modelled_apart(tmp_path: Path) -> None:
    first, second = json.loads(run("--show", str(stored(tmp_path)), "--json"))
    assert first["modelled"]["read_bytes"] == moved()[0]
    assert "read_bytes" not in first["measured"]
    assert first["read_error"] == pytest.approx(-0.04)
    assert second["measured"]["status"] == "error"


def test_either_a_configuration_or_a_file_is_wanted() -> None:
    with pytest.raises(UsageError, match="CONFIG"):
        run()


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text("version: 1\nproviders: [naive]\nproblems: {dtype: fp32, seq_len: 64, head_dim: 32, heads: 1}\n")
    with pytest.raises(nsight.CountersUnavailable, match="CUDA GPU"):
        run(str(config), "--device", "cpu", "--out", str(tmp_path))
    assert not list(tmp_path.rglob(store.FILE))
