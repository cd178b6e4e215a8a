"""The GPU catalogue and the file of ceilings."""

import json
import re

import pytest

from flashbench.errors import StoreError, UsageError
from flashbench.hardware.catalogue import catalogue, device_id, get, match
from flashbench.hardware.ceilings import Ceiling, choose, load, save, spec_ceilings
from flashbench.records import Device

GIB = 2**30
CLOSE = 0.02


def card(name, sm_count=132, memory_bytes=80 * GIB, **more):
    return Device("cuda", name, memory_bytes, sm_count=sm_count, **more)


H200 = card("NVIDIA H200", memory_bytes=150_754_820_096)


@pytest.mark.parametrize("spec", catalogue(), ids=lambda s: s.id)
def test_every_peak_is_sms_times_rate_times_clock(spec):
    tensor = spec.sm_count * spec.flop_per_clk_sm["fp16"] * spec.tensor_clock_mhz / 1e6
    assert spec.peak_tflops("fp16") == pytest.approx(tensor, rel=CLOSE)
    simt = spec.sm_count * spec.flop_per_clk_sm["fp32"] * spec.boost_clock_mhz / 1e6
    assert spec.peak_tflops("fp32") == pytest.approx(simt, rel=CLOSE)


@pytest.mark.parametrize("spec", [s for s in catalogue() if s.memory_clock_mhz], ids=lambda s: s.id)
def test_every_bandwidth_is_twice_the_memory_clock_times_the_bus(spec):
    assert spec.hbm_gbps == pytest.approx(2 * spec.memory_clock_mhz * spec.memory_bus_bits / 8 / 1000, rel=CLOSE)


def test_only_entries_that_say_so_lack_a_memory_clock():
    silent = [
        s.id for s in catalogue() if not s.memory_clock_mhz and "memory clock not published" not in (s.notes or "")
    ]
    assert silent == []


def test_entries_whose_clock_was_solved_from_the_peak_say_so():
    solved = {s.id for s in catalogue() if s.clock_solved_from_peak}
    assert {"h100-pcie-80gb", "h100-nvl-94gb", "h200-nvl-141gb", "l40s", "a10g"} <= solved
    assert not {"a100-pcie-80gb", "h100-sxm5-80gb", "h200-sxm-141gb"} & solved


@pytest.mark.parametrize("spec", catalogue(), ids=lambda s: s.id)
def test_tensor_rates_halve_and_double_with_the_size_of_the_dtype(spec):
    fp16 = spec.peak_tflops("fp16")
    assert spec.peak_tflops("bf16") in (fp16, None)
    assert spec.peak_tflops("tf32") is None or spec.peak_tflops("tf32") == pytest.approx(fp16 / 2, rel=CLOSE)
    assert spec.peak_tflops("fp8") is None or spec.peak_tflops("fp8") == pytest.approx(2 * fp16, rel=CLOSE)


def test_ids_and_names_are_each_of_one_entry_and_ids_are_safe_folder_names():
    ids = [s.id for s in catalogue()]
    names = [name for s in catalogue() for name in s.nvml_names]
    assert len(set(ids)) == len(ids)
    assert len(set(names)) == len(names)
    assert [i for i in ids if not re.fullmatch(r"[a-z0-9-]+", i)] == []


@pytest.mark.parametrize(
    ("gpu", "peaks"),
    [
        ("a100-pcie-80gb", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp8": None}),
        ("h100-sxm5-80gb", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}),
        ("h100-pcie-80gb", {"bf16": 756.4}),
        ("v100-sxm2-16gb", {"bf16": None, "fp16": 125}),
    ],
)
def test_peaks_are_dense_and_of_the_dtype_asked_for(gpu, peaks):
    # RO-02, RO-03
    assert {dtype: get(gpu).peak_tflops(dtype) for dtype in peaks} == peaks


@pytest.mark.parametrize(
    ("name", "sm_count", "memory_gib", "gpu", "hbm_gbps"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 79.25, "a100-sxm4-80gb", 2039),
        ("NVIDIA A100 80GB PCIe", 108, 79.15, "a100-pcie-80gb", 1935),
        ("NVIDIA A100-PCIE-40GB", 108, 39.4, "a100-pcie-40gb", 1555),
        ("NVIDIA H100 80GB HBM3", 132, 79.1, "h100-sxm5-80gb", 3350),
        ("NVIDIA H100 PCIe", 114, 79.1, "h100-pcie-80gb", 2000),
        ("NVIDIA H100 NVL", 132, 93.1, "h100-nvl-94gb", 3938),
        ("NVIDIA H200", 132, 139.8, "h200-sxm-141gb", 4800),
        ("NVIDIA GH200 480GB", 132, 94.5, "gh200-96gb", 4000),
        ("NVIDIA GH200 144G HBM3e", 132, 142.5, "gh200-144gb", 4900),
        ("NVIDIA B200", 148, 178.35, "b200-sxm", 7700),
        ("NVIDIA A10G", 80, 21.99, "a10g", 600),
        ("Tesla T4", 40, 14.6, "t4", 320),
        ("Tesla V100-SXM2-32GB", 80, 31.7, "v100-sxm2-32gb", 900),
    ],
)
def test_each_variant_maps_to_its_own_entry(name, sm_count, memory_gib, gpu, hbm_gbps):
    # RO-01
    device = card(name, sm_count, int(memory_gib * GIB))
    assert (match(device).id, match(device).hbm_gbps) == (gpu, hbm_gbps)
    assert device_id(device) == gpu


@pytest.mark.parametrize(
    "device",
    [
        card("NVIDIA H20", 78, 96 * GIB),
        card("NVIDIA H800", memory_bytes=80 * GIB),
        card("NVIDIA H200 SuperPod Edition", memory_bytes=H200.memory_bytes),
        card("NVIDIA H200", sm_count=114, memory_bytes=H200.memory_bytes),
        card("NVIDIA H200", memory_bytes=96 * GIB),
        card("NVIDIA H200", sm_count=None, memory_bytes=H200.memory_bytes),
        card("nvidia h200", memory_bytes=H200.memory_bytes),
        Device("cpu", "NVIDIA H200", H200.memory_bytes, sm_count=132),
    ],
    ids=lambda d: f"{d.kind} {d.name} {d.sm_count} {d.memory_bytes // GIB}",
)
def test_a_device_that_differs_in_name_sms_or_memory_is_unknown(device):
    # RO-01
    assert match(device) is None
    assert device_id(device) != "h200-sxm-141gb"


@pytest.mark.parametrize("mig", [None, True])
def test_a_mig_slice_is_scaled_by_its_sms_and_says_so(mig):
    whole = get("a100-sxm4-40gb")
    part = match(card("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 19 * GIB, mig=mig))
    assert part.peak_tflops("bf16") == pytest.approx(312 * 42 / 108)
    assert part.hbm_gbps == pytest.approx(1555 * 42 / 108)
    assert part.ridge("bf16") == pytest.approx(whole.ridge("bf16"))
    assert "42 of 108 SMs" in part.notes
    assert part.id == "a100-sxm4-40gb-mig-3g-20gb"


def test_a_slice_that_only_its_device_record_gives_away_is_scaled_too():
    part = match(card("NVIDIA A100-SXM4-40GB", 14, 5 * GIB, mig=True))
    assert part.sm_count == 14
    assert part.id == "a100-sxm4-40gb-mig-14sm"


def test_a_card_with_mig_off_is_whole():
    assert match(card("NVIDIA A100-SXM4-40GB", 108, 40 * GIB, mig=False)).notes == get("a100-sxm4-40gb").notes


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device("cpu", "AMD EPYC 7B13 64-Core Processor", GIB), "cpu-amd-epyc-7b13-64-core-processor"),
        (card("NVIDIA H800/../../etc"), "nvidia-h800-etc"),
        (card("图形"), "unknown"),
        (card("x" * 300), "x" * 64),
    ],
    ids=["cpu", "path", "no letters", "long"],
)
def test_an_unknown_device_gets_a_safe_folder_name(device, expected):
    assert device_id(device) == expected


def test_an_unknown_id_names_the_nearest_and_all_known_ones():
    with pytest.raises(UsageError, match=r"did you mean 'h100-sxm5-80gb'\? \(known: a100-pcie-40gb, ") as error:
        get("h100-sxm-80gb")
    assert error.value.exit_code == 2


def test_the_silicon_limit_follows_the_maximum_clock_not_the_data_sheets():
    h200 = get("h200-sxm-141gb")
    assert h200.limit_tflops("bf16", 1980) == pytest.approx(132 * 4096 * 1980 / 1e6, rel=0.001)
    assert h200.limit_tflops("fp32", 1980) == pytest.approx(66.9, rel=0.001)
    assert h200.limit_tflops("bf16") == h200.limit_tflops("bf16", 1980)
    assert get("a100-pcie-80gb").limit_tflops("fp8", 1410) is None


@pytest.mark.parametrize(
    ("gpu", "at_64", "at_128"), [("a100-pcie-80gb", 624, 1247), ("h100-sxm5-80gb", 989, 1979), ("b200-sxm", 1125, 2250)]
)
def test_the_exponential_unit_bounds_small_head_dimensions(gpu, at_64, at_128):
    spec = get(gpu)
    assert spec.exp_tflops(64) == pytest.approx(at_64, rel=0.001)
    assert spec.exp_tflops(128) == pytest.approx(at_128, rel=0.001)
    assert spec.exp_tflops(128, mode="backward") == pytest.approx(2.5 * at_128, rel=0.001)
    assert spec.exp_tflops(192, 64) == spec.exp_tflops(128)


def test_the_roofline_climbs_with_the_bandwidth_and_stops_at_the_peak():
    spec = get("a100-pcie-80gb")
    assert spec.attainable_tflops("bf16", 10) == pytest.approx(19.35)
    assert spec.attainable_tflops("bf16", 1000) == 312
    assert spec.attainable_tflops("fp8", 1000) is None


def test_a_card_without_an_fp8_unit_has_no_fp8_ceiling_and_still_a_memory_roof():
    ceilings = spec_ceilings(get("a100-pcie-80gb"))
    assert choose(ceilings, "compute", "fp8") is None
    assert choose(ceilings, "compute", "bf16").value == 312
    assert choose(ceilings, "hbm").value == 1935
    assert choose(ceilings, "l2").value == pytest.approx(7219, rel=0.001)


def test_an_l2_bandwidth_that_no_data_sheet_gives_is_left_out():
    assert choose(spec_ceilings(get("h100-sxm5-80gb")), "l2") is None


def gemm(value, regime, source="measured"):
    return Ceiling("compute", "bf16", "gemm", value, "TFLOP/s", source, regime)


def test_a_point_is_held_to_the_ceiling_measured_in_its_own_regime():
    ceilings = (*spec_ceilings(get("h200-sxm-141gb")), gemm(788, "isolated"), gemm(677, "sustained"))
    assert choose(ceilings, "compute", "bf16", "sustained").value == 677
    assert choose(ceilings, "compute", "bf16", "isolated").value == 788
    assert choose(ceilings[:-1], "compute", "bf16", "sustained").source == "spec"


def test_ceilings_come_back_from_their_file_as_they_were(tmp_path):
    device = card("NVIDIA H200", capability=(9, 0), versions={"torch": "2.13"})
    ceilings = (*spec_ceilings(get("h200-sxm-141gb")), gemm(788, "isolated"))
    path = tmp_path / "cache" / "ceilings.json"
    save(path, device, ceilings)
    assert load(path) == (device, ceilings)
    assert [p.name for p in path.parent.iterdir()] == ["ceilings.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "ceilings.json"
    save(path, H200, [gemm(788, "isolated")])
    with pytest.raises(ValueError, match="JSON"):
        save(path, H200, [gemm(float("nan"), "isolated")])
    assert load(path)[1] == (gemm(788, "isolated"),)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": "x"}',
        '{"schema": 1}',
        '{"schema": 1, "device": {}, "ceilings": []}',
        '{"schema": 1, "device": {"kind": "cpu", "name": "x", "memory_bytes": 1}, "ceilings": [{"level": "hbm"}]}',
        '{"schema": 1, "device": 3, "ceilings": 4}',
    ],
)
def test_a_damaged_file_is_a_store_error_that_names_it(tmp_path, text):
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"ceilings\.json: damaged.*measure the ceilings again"):
        load(path)


@pytest.mark.parametrize("value", [0, -1, "fast", None])
def test_a_ceiling_that_is_no_positive_number_is_damage(tmp_path, value):
    path = tmp_path / "ceilings.json"
    save(path, H200, [gemm(788, "isolated")])
    content = json.loads(path.read_text())
    content["ceilings"][0]["value"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="damaged"):
        load(path)


def test_a_newer_schema_is_refused_and_an_absent_file_asks_to_measure(tmp_path):
    path = tmp_path / "ceilings.json"
    with pytest.raises(StoreError, match="no ceilings measured yet"):
        load(path)
    path.write_text('{"schema": 99, "device": {}, "ceilings": []}')
    with pytest.raises(StoreError, match="schema 99; this version reads up to 1"):
        load(path)
