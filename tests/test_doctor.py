"""The doctor judges facts: each fault is named with what it costs and what cures it, and a sound machine has none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import H200, Card, FakeNvml

from flashbench.measure.doctor import examine
from flashbench.measure.findings import SEVERITIES, Finding, troubling
from flashbench.measure.gpu_facts import GpuFacts, read_gpu, visible
from flashbench.measure.machine import DeviceLock, Machine, _admin_only, _lock, look

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
SOUND_GPU = GpuFacts(
    name="NVIDIA H200",
    uuid=UUID,
    persistence=True,
    other_processes=0,
    power_limit_w=700.0,
    default_power_limit_w=700.0,
    max_power_limit_w=700.0,
    application_clock_mhz=1980,
    default_application_clock_mhz=1980,
    max_sm_clock_mhz=1980,
    held_by_application_clocks=False,
    throttle_reasons=(),
    ecc=True,
    mig=False,
)
SOUND = Machine(
    gpus=(SOUND_GPU,),
    driver_present=True,
    driver="580.159.04",
    driver_cuda=(13, 0),
    torch="2.11.0+cu130",
    torch_cuda=(13, 0),
    triton="3.6.0",
    triton_wanted="3.6.0",
    governors=("performance",),
    load=0.2,
    cores=16,
    virtual=False,
    counters_for_admin_only=False,
    ncu="/usr/local/bin/ncu",
    free_bytes=500 << 30,
)


def with_gpu(**changes) -> Machine:
    return replace(SOUND, gpus=(replace(SOUND_GPU, **changes),))


def beyond_sound(machine: Machine) -> list[Finding]:
    """What is found of `machine` and not of a sound one, but for the checks that passed."""
    known = examine(SOUND)
    return [finding for finding in examine(machine) if finding not in known and finding.severity != "ok"]


def test_a_sound_machine_has_nothing_to_cure() -> None:
    assert troubling(examine(SOUND)) == []
    assert [finding.cure for finding in examine(SOUND) if finding.cure] == []


@pytest.mark.parametrize(
    ("machine", "severity", "what", "cost", "cure"),
    [
        (with_gpu(persistence=False), "warning", "persistence mode is off", "415 and 866 us", f"-i {UUID} -pm 1"),
        (with_gpu(other_processes=2), "warning", "2 other process", "13 %", "nvidia-smi"),
        (with_gpu(power_limit_w=500.0), "warning", "500 W, the default is 700 W", "273 us .* 303 us", f"-i {UUID} -pl 700"),
        (with_gpu(default_power_limit_w=600.0, power_limit_w=600.0), "info", "600 W, the highest is 700 W", "303 us", "-pl 700"),
        (with_gpu(application_clock_mhz=1500), "warning", "1500 of 1980 MHz", "32% longer", f"-i {UUID} -rac"),
        (
            with_gpu(application_clock_mhz=1500, default_application_clock_mhz=1500, held_by_application_clocks=True),
            "warning", "1500 of 1980 MHz", "32% longer", "-rac",
        ),
        (with_gpu(throttle_reasons=("hardware thermal slowdown",)), "warning", "thermal", "1813 MHz at 64 C", "TEMPERATURE"),
        (with_gpu(throttle_reasons=("software power cap",)), "warning", "power cap", "-15 %", "POWER"),
        (with_gpu(mig=True), "warning", "MIG is on", "share of SMs", "-mig 0"),
        (replace(SOUND, torch_cuda=(13, 0), driver_cuda=(12, 4)), "problem", "supports up to 12.4", "does not start", "CUDA 12"),
        (replace(SOUND, torch="2.13.0+cpu", torch_cuda=None), "problem", "built without CUDA", "never used", "pytorch.org"),
        (replace(SOUND, torch=None), "problem", "torch is not installed", "nothing", "pip install torch"),
        (replace(SOUND, triton="3.5.0"), "warning", "3.5.0 is not the 3.6.0", "FlexAttention", "pip install triton==3.6.0"),
        (replace(SOUND, old_pynvml="11.5.0"), "warning", "pynvml 11.5.0", "warns at import", "pip uninstall -y pynvml"),
        (replace(SOUND, governors=("performance", "powersave")), "warning", "is powersave", "271 TFLOP/s", "cpupower"),
        (replace(SOUND, load=12.0), "warning", "load 12.0 on 16 cores", "271 TFLOP/s", "ps "),
        (replace(SOUND, free_bytes=500 << 20), "warning", "0.5 GiB", "ends a run", "df "),
        (replace(SOUND, free_bytes=1 << 20), "problem", "0.0 GiB", "ends a run", "df "),
        (replace(SOUND, writable=False), "problem", "cannot be written", "no row", "--out"),
        (replace(SOUND, locks=(DeviceLock("/tmp/flashbench-x.lock", 4711, True),)), "warning", "process 4711", "refused", "ps 4711"),
        (replace(SOUND, locks=(DeviceLock("/tmp/flashbench-x.lock", None, False),)), "problem", "another user", "lock", "rm /tmp"),
        (replace(SOUND, environment={"CUDA_LAUNCH_BLOCKING": "1"}), "warning", "CUDA_LAUNCH_BLOCKING=1", "no sample", "unset"),
        (
            replace(SOUND, gpus=(), nvml_problem="NVML does not start: Driver/library version mismatch"),
            "problem", "version mismatch", "no clocks", "nvidia-smi",
        ),
        (replace(SOUND, gpus=(), nvml_problem="nvidia-ml-py is not installed"), "problem", "not installed", "no clocks", "pip install"),
        (replace(SOUND, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}), "problem", "no GPU is visible", "CPU", "unset"),
        (replace(SOUND, ncu=None), "info", "ncu", "modelled only", "nsight-compute"),
        (
            replace(SOUND, counters_for_admin_only=True),
            "info", "RmProfilingAdminOnly: 1", "ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_cost_and_its_cure(
    machine: Machine, severity: str, what: str, cost: str, cure: str
) -> None:
    (finding,) = beyond_sound(machine)
    assert finding.severity == severity
    assert what in finding.what
    assert re.search(cost, finding.cost or "")
    assert cure in (finding.cure or "")


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (replace(SOUND, virtual=True), "virtual machine"),
        (replace(SOUND, cores=2), "few cores"),
        (with_gpu(ecc=False), "ECC is off"),
        (with_gpu(application_clock_mhz=1500, default_application_clock_mhz=1500), "at their default, 1500 of 1980"),
        (replace(SOUND, torch_cuda=(13, 2)), "supports up to 13.0"),
        (replace(SOUND, gpus=(), driver_present=False, nvml_problem="nvidia-ml-py is not installed"), "no GPU here"),
    ],
)
def test_what_is_only_to_be_known_is_no_reason_to_fail(machine: Machine, what: str) -> None:
    assert troubling(beyond_sound(machine)) == []
    assert what in " ".join(finding.what for finding in beyond_sound(machine))


def test_what_cannot_be_read_is_no_fault() -> None:
    unreadable = Machine(gpus=(GpuFacts("some GPU", UUID),), torch="2.11.0", torch_cuda=(13, 0), driver_present=True)
    assert troubling(examine(unreadable)) == []


def test_an_administrator_may_read_the_counters() -> None:
    assert beyond_sound(replace(SOUND, counters_for_admin_only=True, is_admin=True)) == []


def test_a_variable_that_switches_something_off_is_not_a_fault() -> None:
    assert beyond_sound(replace(SOUND, environment={"CUDA_LAUNCH_BLOCKING": "0", "TRITON_INTERPRET": "false"})) == []


def test_findings_come_worst_first() -> None:
    machine = replace(with_gpu(persistence=False), writable=False, virtual=True)
    order = [SEVERITIES.index(finding.severity) for finding in examine(machine)]
    assert order == sorted(order)
    assert {0, 1, 2, 3} == set(order)


def test_a_left_over_lock_that_can_be_taken_is_harmless() -> None:
    assert beyond_sound(replace(SOUND, locks=(DeviceLock("/tmp/flashbench-x.lock", None, True),))) == []


def test_every_gpu_is_judged_by_itself() -> None:
    other = replace(SOUND_GPU, uuid="GPU-2", persistence=False)
    (finding,) = beyond_sound(replace(SOUND, gpus=(SOUND_GPU, other)))
    assert "-i GPU-2 " in (finding.cure or "")


# Which GPUs CUDA would see

A, B = replace(SOUND_GPU, uuid="GPU-aa11"), replace(SOUND_GPU, uuid="GPU-bb22")
OTHER = replace(B, name="NVIDIA L4")


@pytest.mark.parametrize(
    ("gpus", "environment", "seen"),
    [
        ((A, B), {}, (A, B)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "1"}, (B,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "1,0"}, (B, A)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, (B,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, (A,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "7"}, ()),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "MIG-8932f937"}, (A, B)),
        ((A, OTHER), {"CUDA_VISIBLE_DEVICES": "1"}, (A, OTHER)),
        ((A, OTHER), {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (OTHER,)),
    ],
)
def test_only_visible_gpus_are_judged(gpus, environment: dict[str, str], seen) -> None:
    assert visible(gpus, environment) == seen


# Facts


def test_a_sound_h200_reads_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Card(UUID, H200)))
    assert read_gpu(UUID) == SOUND_GPU


def test_the_machine_is_read_through_nvml_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = FakeNvml(Card(UUID, {**H200, "PersistenceMode": 0}))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = look(tmp_path / "not" / "yet" / "there")
    assert [gpu.uuid for gpu in machine.gpus] == [UUID]
    assert (machine.driver, machine.driver_cuda) == ("580.159.04", (13, 0))
    assert any("persistence mode is off" in finding.what for finding in examine(machine))
    assert machine.writable
    assert module.open == 0


def test_torchs_own_build_is_read_without_importing_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    built = torch.version.cuda
    assert look(tmp_path).torch_cuda == (tuple(int(n) for n in built.split(".")[:2]) if built else None)


@pytest.mark.parametrize(
    ("text", "restricted"),
    [("EnableMSI: 1\nRmProfilingAdminOnly: 1\n", True), ("RmProfilingAdminOnly: 0\n", False), ("EnableMSI: 1\n", None), (None, None)],
)  # fmt: skip
def test_the_drivers_parameters_say_who_may_profile(text: str | None, restricted: bool | None) -> None:
    assert _admin_only(text) is restricted


def test_a_lock_of_a_process_that_has_ended_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "flashbench-GPU-1.lock"
    path.write_text("999999999\n")
    assert _lock(path).holder is None


def test_a_lock_that_names_a_process_of_another_program_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "flashbench-GPU-1.lock"
    with subprocess.Popen(["sleep", "60"]) as other:
        path.write_text(f"{other.pid}\n")
        assert _lock(path).holder is None
        other.kill()


def test_a_lock_that_a_sweep_holds_names_it(tmp_path: Path) -> None:
    code = (
        "from flashbench.records import Device\nfrom flashbench.run.lock import device_lock\n"
        "with device_lock(Device('cuda', 'a GPU', 1, uuid='GPU-1')):\n    print(flush=True)\n    input()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sweep:
        assert sweep.stdout is not None
        sweep.stdout.readline()
        lock = _lock(tmp_path / "flashbench-GPU-1.lock")
        sweep.communicate(b"\n")
    assert lock.holder == sweep.pid
    assert _lock(tmp_path / "flashbench-GPU-1.lock").holder is None


# The command


def test_the_command_needs_no_gpu_and_says_so(cli, tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    done = cli("doctor")
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_strict_ends_with_3_on_a_warning_and_prints_the_same(cli) -> None:
    done = cli("doctor", "--strict", "--format", "json", CUDA_LAUNCH_BLOCKING="1")
    findings = json.loads(done.stdout)
    assert done.returncode == 3
    assert any("CUDA_LAUNCH_BLOCKING" in finding["what"] for finding in findings)
    assert all(set(finding) == {"severity", "what", "cost", "cure"} for finding in findings)


def test_a_cure_is_one_line_that_can_be_copied(cli) -> None:
    done = cli("doctor", CUDA_LAUNCH_BLOCKING="1", COLUMNS="40")
    assert "cure   unset CUDA_LAUNCH_BLOCKING" in done.stdout


def test_the_doctor_imports_no_torch() -> None:
    code = (
        "import sys, pathlib, flashbench.measure.machine as m, flashbench.measure.doctor as d\n"
        "d.examine(m.look(pathlib.Path('.')))\n"
        "print([name for name in ('torch', 'triton', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
