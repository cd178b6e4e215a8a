"""NVML may be absent, broken, old or partly unsupported: every reading is then None on its own, and nothing raises or warns.

There is no GPU where these tests run, so `pynvml` is replaced by a module with cards of the test's choice.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_nvml import H200, Card, FakeNvml, NVMLError

import flashbench
from flashbench.errors import UsageError
from flashbench.hardware import catalogue
from flashbench.measure import device as device_module
from flashbench.measure.gpu_facts import read_gpu
from flashbench.measure.sampling import Samples
from flashbench.measure.telemetry import Nvml, Watch, gpu_uuids
from flashbench.measure.visit import _doubts
from flashbench.records import Device, State

FIRST = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
SECOND = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(module: ModuleType) -> ModuleType:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


def card(**changes) -> Card:
    return Card(SECOND, {**H200, **changes})


def without(*names: str) -> Card:
    return Card(SECOND, {name: value for name, value in H200.items() if name not in names})


# NV-01: no NVML, in every way that it can be missing


@pytest.mark.parametrize(
    "reason", ["NVML Shared Library Not Found", "Driver/library version mismatch", "Unknown Error"]
)
def test_an_nvml_that_does_not_start_gives_no_readings_and_a_reason(install, reason: str) -> None:
    module = install(FakeNvml(card(), init_error=NVMLError(reason)))
    nvml = Nvml.open(SECOND)
    watch = Watch(nvml)
    watch.observe()
    nvml.close()
    assert nvml.problem == f"NVML does not start: {reason}"
    assert set(nvml.facts().values()) == {None}
    assert watch.state() is None
    assert nvml.energy_mj() is None
    assert "nvmlShutdown" not in module.calls


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as Python marks a module that is not there
    assert Nvml.open(SECOND).problem == "nvidia-ml-py is not installed"
    assert gpu_uuids() == ((), "nvidia-ml-py is not installed")


def test_bindings_that_fail_at_import_are_a_reason_not_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise OSError('libnvidia-ml.so.1: wrong ELF class')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert "wrong ELF class" in (Nvml.open(SECOND).problem or "")


def test_a_device_without_a_uuid_asks_nvml_nothing(install) -> None:
    module = install(FakeNvml(card()))
    assert Nvml.open(None).problem == "this device has no UUID"
    assert module.calls == []


def test_nvml_is_shut_down_exactly_once_however_often_it_is_closed(install) -> None:
    module = install(FakeNvml(card()))
    nvml = Nvml.open(SECOND)
    nvml.close()
    nvml.close()
    assert module.calls.count("nvmlShutdown") == 1
    assert set(nvml.facts().values()) == {None}


def test_a_gpu_that_nvml_does_not_know_is_a_reason_and_leaves_nvml_closed(install) -> None:
    module = install(FakeNvml(Card(FIRST, H200)))
    nvml = Nvml.open(SECOND)
    assert nvml.problem == f"NVML does not know {SECOND}: Not Found"
    assert module.open == 0


def test_listing_the_gpus_leaves_nvml_closed(install) -> None:
    module = install(FakeNvml(Card(FIRST, H200), card()))
    assert gpu_uuids() == ((FIRST, SECOND), None)
    assert module.open == 0


# NV-03: what is not supported is None, never 0


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ("PowerManagementLimit", "power_limit_w"),
        ("MigMode", "mig"),
        ("EccMode", "ecc"),
        ("PersistenceMode", "persistence"),
        ("MemoryBusWidth", "memory_bus_bits"),
        ("MaxClockInfo", "max_sm_clock_mhz"),
        ("Name", "name"),
    ],
)
def test_a_fact_that_is_not_supported_is_none_alone(install, call: str, fact: str) -> None:
    install(FakeNvml(without(call)))
    facts = Nvml.open(SECOND).facts()
    expected = {fact} if call != "MaxClockInfo" else {fact, "memory_clock_mhz"}
    assert {name for name, value in facts.items() if value is None} == expected


@pytest.mark.parametrize(
    ("calls", "field"),
    [
        (("PowerUsage",), "power_w"),
        (("Temperature",), "temperature_c"),
        (("ComputeRunningProcesses",), "other_processes"),
        (("CurrentClocksEventReasons",), "throttle_reasons"),
    ],
)
def test_a_reading_that_is_not_supported_is_none_alone(install, calls: tuple[str, ...], field: str) -> None:
    install(FakeNvml(without(*calls)))
    watch = Watch(Nvml.open(SECOND))
    watch.observe()
    state = watch.state()
    assert state is not None
    assert [name for name in State.__dataclass_fields__ if getattr(state, name) is None] == [field]


def test_a_missing_clock_is_not_taken_for_throttling(install) -> None:
    install(FakeNvml(without("ClockInfo", "CurrentClocksEventReasons")))
    watch = Watch(Nvml.open(SECOND))
    watch.observe()
    samples = Samples([1.0] * 20, "events", 300.0, 0, 0.2, True)
    assert watch.state() is not None
    assert _doubts(samples, watch.state()) == []


def test_throttling_is_told_with_its_reason_and_its_clocks(install) -> None:
    install(FakeNvml(card(CurrentClocksEventReasons=0x4 | 0x40)))
    watch = Watch(Nvml.open(SECOND))
    watch.observe()
    (doubt,) = _doubts(Samples([1.0] * 20, "events", 300.0, 0, 0.2, True), watch.state())
    assert doubt == "clocks were throttled (hardware thermal slowdown, software power cap): 1965 to 1965 MHz"


def test_idling_and_application_clocks_are_no_throttling(install) -> None:
    install(FakeNvml(card(CurrentClocksEventReasons=0x1 | 0x2)))
    watch = Watch(Nvml.open(SECOND))
    watch.observe()
    state = watch.state()
    assert state is not None
    assert state.throttle_reasons == ()


def test_the_older_name_of_the_throttle_call_is_used_where_the_new_one_is_missing(install) -> None:
    answers = {name: value for name, value in H200.items() if name != "CurrentClocksEventReasons"}
    install(FakeNvml(Card(SECOND, {**answers, "CurrentClocksThrottleReasons": 0x80})))
    watch = Watch(Nvml.open(SECOND))
    watch.observe()
    state = watch.state()
    assert state is not None
    assert state.throttle_reasons == ("hardware power brake",)


def test_ones_own_process_is_no_other_process(install) -> None:
    install(FakeNvml(card(ComputeRunningProcesses=[SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)])))
    watch = Watch(Nvml.open(SECOND))
    state = watch.state()
    assert state is not None
    assert state.other_processes == 1


# NV-04: the GPU is found by its UUID, whatever CUDA_VISIBLE_DEVICES does to the numbers


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """A torch that sees GPUs with these UUIDs, which it writes without their kind."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA H200",
            uuid=uuids[index].partition("-")[2],
            total_memory=150 << 30,
            major=9,
            minor=0,
            multi_processor_count=132,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(device_module, "_sdpa_backends", lambda _device: ())


@pytest.mark.parametrize("visible", ["1", SECOND, "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", "", "1,0"])
def test_torchs_first_gpu_is_described_by_its_own_clocks_not_by_nvmls_first(
    install, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    install(FakeNvml(Card(FIRST, {**H200, "PowerManagementLimit": 300_000}), card(PowerManagementLimit=600_000)))
    pretend_cuda(monkeypatch, SECOND, FIRST)
    described = device_module.describe("auto")
    assert (described.uuid, described.power_limit_w) == (SECOND, 600.0)


def test_a_gpu_that_nvml_does_not_know_is_described_without_its_clocks(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeNvml(Card(FIRST, H200)))
    pretend_cuda(monkeypatch, SECOND)
    described = device_module.describe("auto")
    assert (described.uuid, described.power_limit_w, described.max_sm_clock_mhz, described.mig) == (
        SECOND,
        None,
        None,
        None,
    )


def test_a_mig_instance_is_found_under_its_own_prefix_and_known_as_one(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = "MIG-5c8a1f2e-0000-5111-8222-933344445555"
    install(FakeNvml(Card(FIRST, H200), Card(instance, {"Name": "NVIDIA H200 MIG 1g.18gb"})))
    pretend_cuda(monkeypatch, instance)
    described = device_module.describe(instance)
    assert (described.uuid, described.mig, described.power_limit_w) == (instance, True, None)


@pytest.mark.parametrize("wanted", [FIRST, "cuda:1"])
def test_a_gpu_is_chosen_by_uuid_or_number(install, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    install(FakeNvml(Card(FIRST, H200), card()))
    pretend_cuda(monkeypatch, SECOND, FIRST)
    assert device_module.describe(wanted).index == 1


@pytest.mark.parametrize("wanted", ["cuda:2", "GPU-", "GPU-8932f937-0000", "cuda:x"])
def test_a_gpu_that_is_not_here_is_a_usage_error(install, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    install(FakeNvml(Card(FIRST, H200), card()))
    pretend_cuda(monkeypatch, SECOND, FIRST)
    with pytest.raises(UsageError, match=re.escape(f"--device {wanted}")):
        device_module.describe(wanted)


# NV-05 and NV-06: old bindings


def test_old_bindings_that_speak_bytes_give_text_that_the_catalogue_knows(install) -> None:
    install(FakeNvml(card(Name=b"NVIDIA A100-SXM4-80GB"), wants_bytes=True))
    name = Nvml.open(SECOND).facts()["name"]
    assert name == "NVIDIA A100-SXM4-80GB"
    spec = catalogue.match(Device("cuda", name, 80 << 30, sm_count=108, capability=(8, 0)))
    assert spec is not None
    assert spec.id.startswith("a100-sxm4-80gb")


def test_the_warning_of_the_deprecated_package_is_neither_shown_nor_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(
        "import warnings\nwarnings.warn('The pynvml package is deprecated', FutureWarning)\n"
        "def nvmlInit(): raise RuntimeError('reached')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Nvml.open(SECOND).problem == "NVML does not start: reached"


# NV-07: nothing is ever set


def test_reading_everything_calls_nothing_that_sets(install) -> None:
    module = install(FakeNvml(card()))
    nvml = Nvml.open(SECOND)
    nvml.facts()
    nvml.energy_mj()
    watch = Watch(nvml)
    watch.observe()
    watch.state()
    nvml.close()
    read_gpu(SECOND)
    assert len(module.calls) > 20
    assert {c for c in module.calls if not re.match(r"nvml(DeviceGet|Init$|Shutdown$)", c)} == set()


def test_the_package_holds_no_call_that_sets_clocks_power_or_persistence() -> None:
    # So no permission is needed, nothing has to be reset, and nothing stays locked after a crash.
    setter = re.compile(r"nvml\w*?(Set|Reset|Clear|Lock|Modify)[A-Z]")
    found = []
    for path in Path(flashbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
            )
            if isinstance(name, str) and setter.match(name):
                found.append(f"{path.name}: {name}")
            if isinstance(node, ast.Call) and re.match(
                r"subprocess\.|os\.(system|exec|spawn|popen)", ast.unparse(node.func)
            ):
                found += [f"{path.name}: {ast.unparse(node)}"] if "nvidia-smi" in ast.unparse(node) else []
    assert found == []
