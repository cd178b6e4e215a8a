"""Launching flash-v3: what TMA asks of the tensors, and everything that a launch of a design is made of."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from flashbench.errors import UsageError
from flashbench.kernels.counters import next_counters
from flashbench.kernels.flash_v2 import scale_in_bits
from flashbench.kernels.flash_v3 import flash_v3_kernel
from flashbench.kernels.flash_v3_designs import (
    REGISTERS,
    SHARED_BYTES,
    Design,
    box,
    carries,
    design_for,
    tile_bytes,
)
from flashbench.kernels.flash_v3_schedule import ROWS
from flashbench.kernels.gluon_names import TensorDescriptor, gl
from flashbench.kernels.inputs import check_inputs, device_limits, sm_count, visibility
from flashbench.kernels.schedule import section_count
from flashbench.kernels.tiles import describable

CAPABILITY = (9, 0)
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


class Launch(NamedTuple):
    """One launch, ready to make: `flash_v3_kernel[grid](*arguments, **constants)` fills out and lse."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    design: Design
    out: torch.Tensor
    lse: torch.Tensor | None


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    variant: str = "",
    design: Design | None = None,
) -> Launch:
    """The launch for `flash_v3_forward` with the same arguments; allocates its outputs, launches nothing."""
    check_inputs(q, k, v)
    check_supported(q, k, v)
    head_dim, head_dim_v, seq_q, seq_kv = q.shape[3], v.shape[3], q.shape[2], k.shape[2]
    causal, window = visibility(mask, seq_kv)
    design = design or design_for(
        head_dim, head_dim_v, variant, seq_q=seq_q, seq_kv=seq_kv, causal=causal, window=window
    )
    v_tiles = describe(v, design.block_kv, box(head_dim_v))
    return assembled(
        q, k, v_tiles, head_dim_v, design, mask=mask, scale=scale, with_lse=with_lse, out_dtype=v.dtype, descales=None
    )


def assembled(
    q: torch.Tensor,
    k: torch.Tensor,
    v_tiles: Any,
    head_dim_v: int,
    design: Design,
    *,
    mask: str,
    scale: float | None,
    with_lse: bool,
    out_dtype: torch.dtype,
    descales: torch.Tensor | None,
) -> Launch:
    """The launch of a design on inputs that have been checked, V by its descriptor; UsageError where the tiles do not fit."""
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_kv = k.shape[1:3]
    causal, window = visibility(mask, seq_kv)
    scale = head_dim**-0.5 if scale is None else scale
    element_bytes = q.element_size()
    carry = carries(design, head_dim, head_dim_v, causal=causal, element_bytes=element_bytes)
    needed = functools.partial(tile_bytes, design, head_dim, head_dim_v, element_bytes=element_bytes)
    out_tiles = carry or needed(out_tiles=True) <= SHARED_BYTES
    in_place_of_q = box(head_dim) == box(head_dim_v) and out_dtype == q.dtype
    if not out_tiles and (not in_place_of_q or needed(out_tiles=False) > SHARED_BYTES):
        raise UsageError(
            f"tiles of {design.row()} at head_dim {head_dim}/{head_dim_v} do not fit {SHARED_BYTES} bytes of shared memory"
        )
    longest_first = causal and design.longest_first

    out = torch.empty((batch, heads_q, seq_q, head_dim_v), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads_q, seq_q), dtype=torch.float32, device=q.device) if with_lse else None
    d, dv = box(head_dim), box(head_dim_v)
    rows = int(ROWS)
    descriptors = (describe(q, rows, d), describe(k, design.block_kv, d), v_tiles, describe(out, rows, dv))
    tile_count = batch * heads_q * -(-seq_q // design.block_q)
    kv_head_bytes = seq_kv * (head_dim + head_dim_v) * q.element_size()
    sections = section_count(batch * heads_kv, kv_head_bytes, device_limits(q.device).l2_bytes)
    queue = next_counters(q.device) if design.persistent and design.queue else None
    arguments = (
        *descriptors, lse, queue, descales, batch * heads_q, heads_q, heads_q // heads_kv, seq_q, seq_kv, window or 0, sections, tile_count,
        scale_in_bits(scale),
    )  # fmt: skip
    consumer_registers, producer_registers = REGISTERS[design.consumers]
    constants = {
        "CONSUMERS": design.consumers,
        "D": d,
        "DV": dv,
        "BLOCK_KV": design.block_kv,
        "STAGES": design.stages,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "TAIL": not causal and seq_kv % design.block_kv != 0,
        "NEGATIVE_SCALE": scale < 0,
        "WITH_LSE": with_lse,
        "OVERLAP": design.overlap,
        "PINGPONG": design.pingpong,
        "LONGEST_FIRST": longest_first,
        "QUEUE": design.persistent and design.queue,
        "CARRY": carry,
        "LAZY_RESCALE": design.lazy_rescale,
        "EARLY_WAIT": design.early_wait,
        "NAMED_RELEASE": design.named_release,
        "OUT_TILES": out_tiles,
        "CONSUMER_REGISTERS": consumer_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "num_warps": 4,  # of the first consumer; the other roles bring their own
        "enable_fp_fusion": True,  # s * c - m in one instruction; Triton 3.10 no longer does so unasked
    }
    grid = (min(tile_count, sm_count(q.device)) if design.persistent else tile_count,)
    return Launch(grid, arguments, constants, design, out, lse)


def check_supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """UsageError, with the reason, for what this kernel cannot do though others can."""
    reason = dtype_reason(str(q.dtype).removeprefix("torch.")) or head_dim_reason(q.shape[3], v.shape[3])
    if reason:
        raise UsageError(reason)
    check_reachable({"q": q, "k": k, "v": v})


def check_reachable(tensors: dict[str, torch.Tensor]) -> None:
    """UsageError for tensors, by name, that the copy engine cannot read, and for another device than a Hopper GPU."""
    for name, tensor in tensors.items():
        if not describable(tensor):
            raise UsageError(
                f"flash-v3 reads through the copy engine, which takes contiguous channels, 16-byte aligned strides and no repeated memory; "
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; pass {name}.contiguous(), or use flash-v2"
            )
    capability = device_limits(next(iter(tensors.values())).device).capability
    if capability != CAPABILITY:
        where = "no GPU" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise UsageError(f"flash-v3 is written for Hopper, sm_90; this is {where}; flash-v2 runs on other GPUs")


def dtype_reason(dtype: str) -> str | None:
    """Why a dtype cannot be, by any of its names, or None."""
    if dtype in ("bf16", "fp16", "bfloat16", "float16"):
        return None
    return f"flash-v3 takes bf16 and fp16, not {dtype}"


def head_dim_reason(head_dim: int, head_dim_v: int) -> str | None:
    """Why head dimensions cannot be, or None: rows of the tensors start at multiples of 16 bytes, and a tile holds 256 channels."""
    if all(d % 8 == 0 and 0 < d <= 256 for d in (head_dim, head_dim_v)):
        return None
    return f"flash-v3 takes multiples of 8 up to 256 as head_dim, not {head_dim}/{head_dim_v}"


@functools.lru_cache(maxsize=64)
def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """How a tile lies in shared memory, as the matrix unit reads it and the copy engine writes it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], ELEMENTS[dtype])


def describe(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor of (batch, heads, seq, channel) whose tiles are (1, 1, rows, columns). Needs `describable(tensor)`."""
    # The stride of an axis of length 1 means nothing and need not be aligned; any aligned one will do.
    strides = [step if n > 1 else 16 for n, step in zip(tensor.shape[:3], tensor.stride(), strict=False)]
    block = [1, 1, rows, columns]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, tile_layout(rows, columns, tensor.dtype))


def flash_v3_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    variant: str = "",
    design: Design | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q K^T) V for q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv): (B, Hq, Sq, Dv), contiguous, in their dtype.

    On sm_90, in bf16 and fp16, for head dimensions that are multiples of 8 up to 256, and strides that the copy engine takes. Masks (`none`,
    `causal`, `window:W`), grouped heads, the scale (by default D^-1/2, any sign) and the log-sum-exp are those of `flash_v2_forward`.
    A `variant` names one of VARIANTS; a `design` sets every choice by itself. Not differentiable. Raises UsageError, with the reason, for
    what the kernel does not take.
    """
    launch = prepare(q, k, v, mask=mask, scale=scale, with_lse=with_lse, variant=variant, design=design)
    run(launch)
    return launch.out if launch.lse is None else (launch.out, launch.lse)


def run(launch: Launch) -> Any:
    """Make the launch, on its tensors' device; gives Triton's compiled kernel."""
    device = launch.out.device
    if device.index == torch.cuda.current_device():
        return flash_v3_kernel[launch.grid](*launch.arguments, **launch.constants)
    with torch.cuda.device(device):
        return flash_v3_kernel[launch.grid](*launch.arguments, **launch.constants)


def launch_figures(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Tiles, switches, registers, spills and shared memory of the kernel that `flash_v3_forward(q, k, v, **options)` runs; runs it once."""
    return figures(prepare(q, k, v, **options))


def figures(launch: Launch) -> dict[str, Any]:
    """Tiles, switches, registers, spills and shared memory of a launch; makes it.

    The registers are those that a thread is launched with; consumers then take more of them, and the producer fewer (REGISTERS).
    """
    compiled = run(launch)
    design = asdict(launch.design)
    tiles = {
        "block_q": launch.design.block_q,
        "num_warps": launch.design.num_warps,
        "num_stages": design.pop("stages"),
    }
    compiled_to = {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared_bytes": compiled.metadata.shared}
    return {**tiles, **design, **compiled_to}
