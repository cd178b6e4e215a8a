"""V for 8-bit products: transposed, since both operands must be contiguous along what is summed over, and its keys in the order of the weights.

It reads and writes each byte of V, 2 B Hkv Skv Dv in all, at the speed of the memory; attention does it once, where FlashAttention-3 transposes a tile in
shared memory again for every tile of queries. At 16k keys of 16 heads of 128 that is 67 MB, some 16 us of 2.4 ms; at 1k it is a tenth.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import triton
import triton.language as tl

from flashbench.errors import UsageError
from flashbench.kernels.flash_v2_launches import KernelLaunch
from flashbench.kernels.inputs import on

GROUP = 32
"""Keys within which their order is changed: as many as one 8-bit product sums over."""
TILE_BYTES = 16384
"""Of one program: 128 a thread."""
Place = TypeVar("Place", int, torch.Tensor)


def key_at(place: Place) -> Place:
    """The key of a group whose values stand at a place of it: 16 h + 4 t + 2 l + b has key 16 h + 8 l + 2 t + b (flash_v3_e4m3.packed)."""
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@triton.jit
def keys_last_kernel(
    v, out,  # bytes; out contiguous (batch, heads, head dim, padded)
    stride_batch, stride_head, stride_key, heads, seq_kv, padded, blocks, head_dim,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Bytes of V for KEYS keys of a head, read along the channels and written along the keys, 0 behind the last one."""
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * KEYS + tl.arange(0, KEYS)
    # `key_at` of the places, group by group.
    key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    channel = tl.arange(0, CHANNELS)
    v += batch_head // heads * stride_batch + batch_head % heads * stride_head
    there = channel < head_dim
    values = tl.load(
        v + key.to(tl.int64)[:, None] * stride_key + channel[None, :], mask=(key < seq_kv)[:, None] & there[None, :], other=0
    )  # fmt: skip
    rows = out + (batch_head * head_dim + channel) * padded
    tl.store(rows[None, :] + place[:, None], values, mask=(place < padded)[:, None] & there[None, :])


def keys_last_launch(v: torch.Tensor) -> tuple[KernelLaunch, torch.Tensor]:
    """The launch of `keys_last`, and what it fills."""
    batch, heads, seq_kv, head_dim = v.shape
    padded = -(-seq_kv // GROUP) * GROUP
    out = torch.empty((batch, heads, head_dim, padded), dtype=v.dtype, device=v.device)
    channels = max(16, triton.next_power_of_2(head_dim))
    keys = max(GROUP, TILE_BYTES // channels)
    blocks = triton.cdiv(padded, keys)
    arguments = (
        v.view(torch.uint8), out.view(torch.uint8), *v.stride()[:3], heads, seq_kv, padded, blocks, head_dim,
    )  # fmt: skip
    constants = {"KEYS": keys, "CHANNELS": channels}
    return KernelLaunch(keys_last_kernel, (batch * heads * blocks,), arguments, constants), out


def keys_last(v: torch.Tensor) -> torch.Tensor:
    """An e4m3 v (B, Hkv, Skv, Dv), its channels contiguous, as the matrix unit reads it: (B, Hkv, Dv, Skv rounded up to 32), the keys of each 32
    in the order of `key_at`, zeros behind the last one."""
    if v.dtype != torch.float8_e4m3fn or v.stride(3) != 1:
        raise UsageError(f"v must be e4m3 with contiguous channels; it is {v.dtype} with strides {v.stride()}")
    launch, out = keys_last_launch(v)
    with on(v.device):
        launch.kernel[launch.grid](*launch.arguments, **launch.constants)
    return out
