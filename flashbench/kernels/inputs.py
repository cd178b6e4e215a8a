"""What every kernel asks of its inputs and of the device before a launch: shapes that fit together, the mask in numbers, the limits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from flashbench.errors import UsageError, nearest
from flashbench.records import parse_mask

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
PRECISIONS = ("ieee", "tf32")
MAX_HEAD_DIM = 256


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    precision: str = "ieee",
    dtypes: Mapping[torch.dtype, str] = DTYPES,
) -> None:
    """UsageError unless q (B, Hq, Sq, D), k (B, Hkv, Skv, D) and v (B, Hkv, Skv, Dv) can be attended with; strides may be any."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise UsageError(
            f"q, k and v must be (batch, heads, seq, head_dim); they have {q.ndim}, {k.ndim} and {v.ndim} axes"
        )
    batch, heads_q, _, head_dim = q.shape
    heads_kv, head_dim_v = k.shape[1], v.shape[3]
    if k.shape[0] != batch or k.shape[3] != head_dim or v.shape[:3] != k.shape[:3]:
        raise UsageError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong to one attention problem"
        )
    if heads_q % heads_kv:
        raise UsageError(f"{heads_q} query heads do not share {heads_kv} key/value heads evenly")
    if min(*q.shape, *k.shape, head_dim_v) < 1:
        raise UsageError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: no axis may be empty")
    if max(head_dim, head_dim_v) > MAX_HEAD_DIM:
        raise UsageError(
            f"head_dim {max(head_dim, head_dim_v)} is above {MAX_HEAD_DIM}, the largest that this kernel holds on chip"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in dtypes:
        raise UsageError(
            f"q, k and v must share one dtype of {', '.join(dtypes.values())}; they are {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise UsageError(f"q, k and v lie on {q.device}, {k.device} and {v.device}; move them to one device")
    if precision not in PRECISIONS:
        raise UsageError(
            f"unknown precision '{precision}'{nearest(precision, PRECISIONS)} (known: {', '.join(PRECISIONS)})"
        )


def product_dtype(tensor: torch.Tensor, precision: str) -> str:
    """What a kernel multiplies: fp16, bf16, fp32, or tf32 for fp32 tensors of that precision."""
    return "tf32" if precision == "tf32" and tensor.dtype == torch.float32 else DTYPES[tensor.dtype]


@functools.lru_cache(maxsize=256)
def visibility(mask: str, seq_kv: int) -> tuple[bool, int | None]:
    """(causal, window) of a mask; a window is causal too, and one that reaches over all keys is causal and nothing more."""
    canonical = parse_mask(mask)
    if not canonical.startswith("window:"):
        return canonical == "causal", None
    width = int(canonical.removeprefix("window:"))
    return True, width if width < seq_kv else None


class DeviceLimits(NamedTuple):
    """What the choice of blocks and the order of programs depend on."""

    capability: tuple[int, int] | None
    """None where kernels are interpreted on the CPU."""
    shared_bytes: int
    """Most shared memory that one program may take."""
    l2_bytes: int


@functools.lru_cache(maxsize=64)
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device; for any other, where only Triton's interpreter can run, those of no device in particular."""
    if device.type != "cuda":
        return DeviceLimits(None, 2**31, 2**25)
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits((found.major, found.minor), found.shared_memory_per_block_optin, found.L2_cache_size)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within it, launches go to `device`: Triton takes the current one, wherever the tensors lie."""
    foreign = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if foreign else nullcontext()


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; for any other, where kernels are interpreted one program at a time, few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
