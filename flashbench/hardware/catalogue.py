"""What data sheets say of each GPU model, and which of them a device is.

Figures stand in `gpus.yaml`. A device is recognised by its exact name, its SM count and its memory, never by a part of its name:
"H200" is in "GH200 480GB" and "A10" in "A100". An unknown device has no data-sheet figures, and never another card's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashbench.errors import UsageError, nearest
from flashbench.records import Device

MEMORY_TOLERANCE = 0.08
"""Share by which a device's memory may differ from its data sheet's, which says GB and often means GiB, less what ECC takes."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Data-sheet figures of one GPU model. Tensor figures are dense and with fp32 accumulation; None means not published."""

    id: str
    vendor: str
    nvml_names: tuple[str, ...]
    capability: tuple[int, int] | None
    sm_count: int
    boost_clock_mhz: float
    tensor_clock_mhz: float
    """The clock behind the tensor figures; on Hopper it is below the boost clock, at which fp32 is quoted."""
    memory_gb: float
    hbm_gbps: float
    memory_clock_mhz: float | None
    memory_bus_bits: int | None
    dense_tflops: Mapping[str, float] = field(hash=False)
    flop_per_clk_sm: Mapping[str, int] = field(hash=False)
    """FLOP per clock and SM: `fp32` of the ordinary cores, `fp16` of the tensor cores."""
    mufu_per_clk_sm: float | None
    """Exponentials per clock and SM."""
    l2_mb: float
    """MiB; a device's own reading is better where there is one."""
    l2_bytes_per_clk: float | None
    l1_kb_per_sm: float | None
    """L1 and shared memory together."""
    smem_kb_per_sm: float
    smem_bytes_per_clk_sm: float
    tdp_w: float
    source: str
    notes: str | None = None
    clock_solved_from_peak: bool = False

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense peak in TFLOP/s, or None when the card has no unit for this dtype (fp8 on an A100)."""
        return self.dense_tflops.get(dtype)

    def ridge(self, dtype: str) -> float | None:
        """Arithmetic intensity (FLOP/byte of HBM) at which the bandwidth just feeds the peak."""
        peak = self.peak_tflops(dtype)
        return None if peak is None else 1000 * peak / self.hbm_gbps

    def attainable_tflops(self, dtype: str, intensity: float) -> float | None:
        """The roofline at `intensity` FLOP/byte: min(peak, intensity x bandwidth). (Williams, Waterman, Patterson 2009.)"""
        peak = self.peak_tflops(dtype)
        return None if peak is None else min(peak, intensity * self.hbm_gbps / 1000)

    @property
    def texp_per_s(self) -> float | None:
        """Exponentials the hardware unit can do, in 1e12 per second at the tensor clock."""
        if self.mufu_per_clk_sm is None:
            return None
        return self.sm_count * self.mufu_per_clk_sm * self.tensor_clock_mhz / 1e6

    def exp_tflops(self, head_dim: int, head_dim_v: int | None = None, mode: str = "forward") -> float | None:
        """Useful TFLOP/s when the exponential unit does one exp per score and nothing else holds.

        A kernel that computes part of its exps as polynomials may pass it (FlashAttention-4), so it bounds the hardware unit only.
        """
        if self.texp_per_s is None:
            return None
        d, d_v = head_dim, head_dim if head_dim_v is None else head_dim_v
        forward, backward = 2 * (d + d_v), 2 * (3 * d + 2 * d_v)
        flop_per_exp = {"backward": backward, "forward_backward": (forward + backward) / 2}.get(mode, forward)
        return self.texp_per_s * flop_per_exp

    def limit_tflops(self, dtype: str, max_sm_clock_mhz: float | None = None) -> float | None:
        """What the silicon cannot exceed: SMs x rate x the *maximum* SM clock, which may lie above the data sheet's clock.

        Without a clock from the device, the higher of the data sheet's two.
        """
        peak = self.peak_tflops(dtype)
        if peak is None:
            return None
        highest = max_sm_clock_mhz or max(self.boost_clock_mhz, self.tensor_clock_mhz)
        return peak * highest / (self.boost_clock_mhz if dtype == "fp32" else self.tensor_clock_mhz)

    @property
    def l2_bytes(self) -> int:
        return round(self.l2_mb * 2**20)

    @property
    def on_chip_mb(self) -> float | None:
        """L1 and shared memory of all SMs, MiB."""
        return None if self.l1_kb_per_sm is None else self.l1_kb_per_sm * self.sm_count / 1024

    @property
    def smem_tbps(self) -> float:
        """Shared-memory bandwidth of all SMs, TB/s at the tensor clock."""
        return self.smem_bytes_per_clk_sm * self.sm_count * self.tensor_clock_mhz / 1e6


REFERENCE_GPUS = "a100-pcie-80gb,h100-sxm5-80gb"
"""The cards that figures and worksheets stand against unless others are named: ridges of 161 and 295 FLOP/byte in fp16."""


@functools.cache
def catalogue() -> tuple[GpuSpec, ...]:
    """Every GPU model of `gpus.yaml`, in its order."""
    from ruamel.yaml import YAML

    text = importlib.resources.files("flashbench.hardware").joinpath("gpus.yaml").read_text(encoding="utf-8")
    return tuple(_spec(entry) for entry in YAML(typ="safe").load(text))


def _spec(entry: dict[str, Any]) -> GpuSpec:
    absent = {f.name: None for f in dataclasses.fields(GpuSpec) if f.default is dataclasses.MISSING}
    values = {**absent, **entry, "nvml_names": tuple(entry["nvml_names"])}
    if values["capability"] is not None:
        values["capability"] = tuple(values["capability"])
    return GpuSpec(**values)


def get(gpu_id: str) -> GpuSpec:
    """The GPU model with this id (`a100-pcie-80gb`); UsageError, with the nearest and all known ids, when there is none."""
    by_id = {spec.id: spec for spec in catalogue()}
    if gpu_id not in by_id:
        raise UsageError(f"unknown GPU '{gpu_id}'{nearest(gpu_id, by_id)} (known: {', '.join(by_id)})")
    return by_id[gpu_id]


def match(device: Device) -> GpuSpec | None:
    """The data sheet of this device, or None when no entry has its exact name, SM count and memory.

    A MIG slice gets its card's figures scaled by its share of the SMs, with a note that says so.
    """
    if device.kind != "cuda":
        return None
    card, _, profile = device.name.partition(" MIG ")
    spec = next((s for s in catalogue() if card in s.nvml_names), None)
    if spec is None or device.sm_count is None:
        return None
    if profile or device.mig:
        return _slice(spec, device, profile)
    if device.sm_count != spec.sm_count or not _same_memory(device.memory_bytes, spec.memory_gb):
        return None
    return spec


def _same_memory(memory_bytes: int, memory_gb: float) -> bool:
    return any(abs(memory_bytes / (memory_gb * unit) - 1) <= MEMORY_TOLERANCE for unit in (1e9, 2**30))


def _slice(card: GpuSpec, device: Device, profile: str) -> GpuSpec | None:
    assert device.sm_count is not None
    if not 0 < device.sm_count <= card.sm_count:
        return None
    share = device.sm_count / card.sm_count
    return dataclasses.replace(
        card,
        id=f"{card.id}-mig-{_slug(profile) if profile else f'{device.sm_count}sm'}",
        nvml_names=(device.name,),
        sm_count=device.sm_count,
        memory_gb=round(device.memory_bytes / 2**30, 1),
        hbm_gbps=card.hbm_gbps * share,
        memory_clock_mhz=None,
        memory_bus_bits=None,
        dense_tflops={dtype: peak * share for dtype, peak in card.dense_tflops.items()},
        l2_mb=card.l2_mb * share,
        l2_bytes_per_clk=None if card.l2_bytes_per_clk is None else card.l2_bytes_per_clk * share,
        notes=f"MIG slice: figures of {card.id} scaled by {device.sm_count} of {card.sm_count} SMs; its share of the memory may differ",
    )


def device_id(device: Device) -> str:
    """The name of a device in folders and files: the catalogue's id, else its name in letters, digits and hyphens."""
    spec = match(device)
    if spec is not None:
        return spec.id
    return f"cpu-{_slug(device.name)}" if device.kind == "cpu" else _slug(device.name)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:64].strip("-") or "unknown"
