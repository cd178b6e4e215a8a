"""flash-v3 on e4m3 tensors, forward: what they ask for, and the launch.

Why. The matrix unit of Hopper multiplies 8-bit numbers twice as fast as 16-bit ones, and tiles take half the room; the exponentials are as many
as before, so that at head dimension 128 they take as long as the products. The kernel is flash_v3.py, which sees from the tensors what they are:

- e4m3 has 3 bits of mantissa and ends at 448, so tensors are scaled by one factor (a descale: what one unit stands for) for each batch and
  key/value head (quantization.py). Those of Q and K become part of the scale of the scores, that of V multiplies the output once, at the end.
  Weights, at most 1, are multiplied by 2^7, and summed up in fp32 before they are rounded.
- V comes transposed, and with its keys in the order in which one product leaves the weights to the next: a kernel of its own writes it so once
  (flash_v3_keys_last.py). Whoever quantises V, or keeps it over many calls, may store it that way in the first place, and call `prepare`.

Sums of products have what the matrix unit keeps of 8-bit ones, about 14 bits: Triton's default for sm_90 (`max_num_imprecise_acc` 2^30) adds nothing
up apart, and nor does FlashAttention-3.

Sources: FlashAttention-3 (arXiv 2407.08608), section 3.3; Dao-AILab/flash-attention, hopper/ (softmax.h, tile_size.h).
"""

from __future__ import annotations

from typing import Any

import torch

from flashbench.errors import UsageError
from flashbench.kernels import flash_v3_launches as v3
from flashbench.kernels.flash_v3_designs import Design, box
from flashbench.kernels.flash_v3_keys_last import GROUP, keys_last
from flashbench.kernels.flash_v3_launches import Launch
from flashbench.kernels.inputs import check_inputs
from flashbench.kernels.quantization import E4M3

DESIGNS = {
    64: Design(consumers=3, stages=4, early_wait=False, carry=False),
    128: Design(stages=3, carry=False),
    256: Design(pingpong=True, early_wait=False),
}
"""By the larger padded head dimension, as measured at 4k and 16k: docs/flash-v3.md."""


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v_keys_last: torch.Tensor,
    descales: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    design: Design | None = None,
) -> Launch:
    """The launch of the attention kernel on e4m3 tensors, V as `keys_last` gives it; allocates its outputs, launches nothing.

    UsageError, with the reason, for what the kernel does not take.
    """
    batch, heads_kv, seq_kv, head_dim = k.shape
    head_dim_v = v_keys_last.shape[2]
    padded = -(-seq_kv // GROUP) * GROUP
    if v_keys_last.shape != (batch, heads_kv, head_dim_v, padded):
        raise UsageError(
            f"V with its keys last is {tuple(v_keys_last.shape)}, not ({batch}, {heads_kv}, head_dim, {padded})"
        )
    check_inputs(q, k, v_keys_last.transpose(2, 3)[:, :, :seq_kv], dtypes={E4M3: "e4m3"})
    if descales.shape != (batch, heads_kv, 3) or descales.dtype != torch.float32 or not descales.is_contiguous():
        raise UsageError(
            f"descales must be contiguous fp32 ({batch}, {heads_kv}, 3); they are {descales.dtype} {tuple(descales.shape)}"
        )
    if head_dim % 16 or head_dim_v % 8:
        raise UsageError(
            f"flash-v3 in e4m3 takes a head_dim that is a multiple of 16, and of 8 for V, not {head_dim}/{head_dim_v}"
        )
    v3.check_reachable({"q": q, "k": k, "v": v_keys_last})
    design = design or DESIGNS[max(box(head_dim), box(head_dim_v))]
    v_tiles = v3.describe(v_keys_last, box(head_dim_v), design.block_kv)
    return v3.assembled(
        q, k, v_tiles, head_dim_v, design,
        mask=mask, scale=scale, with_lse=with_lse, out_dtype=torch.bfloat16, descales=descales,
    )  # fmt: skip


def flash_v3_fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    design: Design | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q K^T) V for e4m3 q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv): (B, Hq, Sq, Dv), contiguous, in bf16.

    What the numbers stand for is `descales` (B, Hkv, 3) of q, k and v times as much (`quantization.quantized`). Otherwise as `flash_v3_forward`; two launches,
    the first of which is `keys_last`.
    """
    launch = prepare(q, k, keys_last(v), descales, mask=mask, scale=scale, with_lse=with_lse, design=design)
    v3.run(launch)
    return launch.out if launch.lse is None else (launch.out, launch.lse)


def launch_figures(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: torch.Tensor, **options: Any
) -> dict[str, Any]:
    """Tiles, switches, registers, spills and shared memory of the attention kernel that `flash_v3_fp8_forward` runs; runs it once."""
    return v3.figures(prepare(q, k, keys_last(v), descales, **options))
