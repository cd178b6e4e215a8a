"""Launching flash-v3's backward pass: its variants, what they can take, and the operation of PyTorch's autograd that they make up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from flashbench.errors import UsageError, nearest
from flashbench.kernels.autograd import attend, wants_gradients
from flashbench.kernels.blocks import BlockShape, compiled_figures, default_blocks, padded
from flashbench.kernels.flash_v2 import LOG2_E
from flashbench.kernels.flash_v2_gradients import QUERIES, check_backward, queries_shared_bytes
from flashbench.kernels.flash_v2_launches import KernelLaunch, Streams, queries_launch, statistics_launch
from flashbench.kernels.flash_v3_backward import flash_v3_backward_kernel
from flashbench.kernels.flash_v3_designs import REGISTERS, SHARED_BYTES, box
from flashbench.kernels.flash_v3_launches import check_supported, describe, flash_v3_forward
from flashbench.kernels.flash_v3_schedule import HALF, KEYS
from flashbench.kernels.flash_v3_sums import sums_launch
from flashbench.kernels.gluon_names import TensorDescriptor, gl
from flashbench.kernels.inputs import check_inputs, device_limits, on, product_dtype, visibility
from flashbench.kernels.schedule import section_count
from flashbench.kernels.tiles import describable

MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Design:
    """One way to build the backward kernel."""

    halves: int
    """A step takes 64 queries, whose dQ the consumers share out by channels, or two times 64 (2), of which each makes the dQ of one."""
    stages: int = 2
    """Tiles of Q and of dO in flight or in use."""
    with_dq: bool = True
    """dQ is added up in memory, in whatever order the programs come; otherwise another kernel makes it."""

    consumers: int = 2
    """Warpgroups that compute, of 64 keys each."""

    @property
    def block_q(self) -> int:
        return self.halves * int(HALF)

    @property
    def block_kv(self) -> int:
        return self.consumers * int(KEYS)


DESIGNS = {64: Design(halves=2), 128: Design(halves=1)}
"""By the larger padded head dimension."""
VARIANTS: dict[str, dict[str, Any]] = {"": {}, "deterministic": {"with_dq": False}}
"""Fields of the head dimension's design that a variant sets."""


class Backward(NamedTuple):
    """A backward pass, ready to run: `run(backward)` makes its launches in turn and fills dq, dk and dv."""

    statistics: KernelLaunch
    keys: KernelLaunch
    queries: KernelLaunch
    """Fills dQ: of what the other kernel added up, or, where it does not, by flash-v2's way."""
    query_blocks: BlockShape | None
    """Of flash-v2's."""
    design: Design
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def backward_reason(head_dim: int, head_dim_v: int) -> str | None:
    """Why head dimensions that the forward pass takes cannot be, or None."""
    if max(head_dim, head_dim_v) <= MAX_HEAD_DIM:
        return None
    return (
        f"flash-v3's backward pass takes a head_dim up to {MAX_HEAD_DIM}, beyond which dK and dV do not fit the registers, "
        f"not {head_dim}/{head_dim_v}; flash-v2 takes more"
    )


def design_for(head_dim: int, head_dim_v: int, variant: str = "") -> Design:
    """The design of a variant for a head dimension; UsageError for a variant that is not known, or a head dimension too large."""
    if variant not in VARIANTS:
        known = ", ".join(filter(None, VARIANTS))
        raise UsageError(
            f"unknown backward variant '{variant}' of flash-v3{nearest(variant, VARIANTS)} (known: {known})"
        )
    reason = backward_reason(head_dim, head_dim_v)
    if reason:
        raise UsageError(reason)
    return replace(DESIGNS[max(box(head_dim), box(head_dim_v))], **VARIANTS[variant])


def backward_tile_bytes(design: Design, width: int) -> int:
    """Shared memory of one program, from above, for tiles of `width` channels."""
    q_and_d_out = 2 * design.stages * design.block_q * width
    k_and_v = 2 * design.block_kv * width
    d_s = 2 * design.block_q * design.block_kv if design.with_dq else 0
    dq = design.block_q * width if design.with_dq else 0
    statistics, barriers = 2 * design.stages * design.block_q, 1024
    return 2 * (q_and_d_out + k_and_v + d_s) + 4 * (dq + statistics) + barriers


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    variant: str = "",
    design: Design | None = None,
) -> Backward:
    """The launches for `flash_v3_backward` with the same arguments; allocates its outputs, launches nothing."""
    check_inputs(q, k, v)
    check_supported(q, k, v)
    check_backward(q, v, out, lse, d_out)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_kv, head_dim_v = v.shape[1:]
    design = design or design_for(head_dim, head_dim_v, variant)
    width = max(box(head_dim), box(head_dim_v))
    if backward_tile_bytes(design, width) > SHARED_BYTES:
        raise UsageError(
            f"{design} at head_dim {head_dim}/{head_dim_v} does not fit {SHARED_BYTES} bytes of shared memory"
        )
    causal, window = visibility(mask, seq_kv)
    scale = head_dim**-0.5 if scale is None else scale
    if not describable(d_out):
        d_out = d_out.contiguous()  # what autograd hands back may be one number seen everywhere

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sums = torch.empty(q.shape, dtype=torch.float32, device=q.device) if design.with_dq else None
    statistics = statistics_launch(out, d_out, lse)
    lse_bits, delta = statistics.arguments[3:5]
    if sums is not None:  # which the kernel adds to
        to_zero = {"sums": sums, "HEAD_DIM": head_dim, "D": padded(head_dim)}
        statistics = statistics._replace(constants=statistics.constants | to_zero)
    limits = device_limits(q.device)
    keys, rows = int(KEYS), int(HALF)
    descriptors = (
        describe(q, rows, width),
        describe(k, keys, width),
        describe(v, keys, width),
        describe(d_out, rows, width),
        describe_rows(lse_bits, rows),
        describe_rows(delta, rows),
        None if sums is None else describe_sums(sums, width // design.consumers if design.halves == 1 else width),
        describe(dk, keys, width),
        describe(dv, keys, width),
    )
    # What the programs of one head go over: Q and dO of its group and the sums of dQ.
    row_bytes = (head_dim + head_dim_v) * q.element_size() + (4 * head_dim if design.with_dq else 0)
    sections = section_count(batch * heads_kv, heads_q // heads_kv * seq_q * row_bytes, limits.l2_bytes)
    arguments = (
        *descriptors, batch * heads_kv, heads_kv, heads_q // heads_kv, seq_q, seq_kv, window or 0, sections, scale, scale * LOG2_E,
    )  # fmt: skip
    consumer_registers, producer_registers = REGISTERS[design.consumers]
    constants = {
        "CONSUMERS": design.consumers,
        "D": width,
        "HALVES": design.halves,
        "STAGES": design.stages,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "TAIL": not causal and seq_kv % design.block_kv != 0,
        "WITH_DQ": design.with_dq,
        "CONSUMER_REGISTERS": consumer_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "num_warps": 4,  # of the first consumer; the other roles bring their own
        "enable_fp_fusion": True,  # s * c - lse in one instruction; Triton 3.10 no longer does so unasked
    }
    grid = (batch * heads_kv * -(-seq_kv // design.block_kv),)
    main = KernelLaunch(flash_v3_backward_kernel, grid, arguments, constants)
    blocks = None
    if sums is not None:
        queries = sums_launch(sums, dq, scale)
    else:
        blocks = default_blocks(
            limits.capability, product_dtype(q, "ieee"), head_dim, head_dim_v, limits.shared_bytes,
            descriptors=True, kernel=QUERIES, need=queries_shared_bytes,
        )  # fmt: skip
        streams = Streams(q, k, v, d_out, lse_bits, delta, causal, window, scale, "ieee", limits)
        queries = queries_launch(streams, dq, blocks)
    return Backward(statistics, main, queries, blocks, design, dq, dk, dv)


def describe_rows(numbers: torch.Tensor, rows: int) -> Any:
    """A descriptor of one number a query, (batch * heads, padded seq), `rows` of them at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([1, rows], gl.float32)
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), [1, rows], layout)


def describe_sums(sums: torch.Tensor, channels: int) -> Any:
    """A descriptor of dQ in fp32, contiguous, to which tiles of 64 queries and `channels` are added."""
    block = [1, 1, int(HALF), channels]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    strides = [step if n > 1 else 16 for n, step in zip(sums.shape[:3], sums.stride(), strict=False)]
    return TensorDescriptor(sums, list(sums.shape), [*strides, 1], block, layout)


def run(backward: Backward) -> list[Any]:
    """Make the launches, on their tensors' device; gives Triton's compiled kernels, that of the row statistics left out."""
    with on(backward.dq.device):
        compiled = [
            launch.kernel[launch.grid](*launch.arguments, **launch.constants)
            for launch in (backward.statistics, backward.keys, backward.queries)
        ]
    return compiled[1:]


def flash_v3_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    variant: str = "",
    design: Design | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV, contiguous and in the dtype of q, k and v, for the gradient `d_out` of `out`.

    q, k, v, mask and scale as `flash_v3_forward` was given them; out (B, Hq, Sq, Dv) and lse (B, Hq, Sq, fp32, natural) as it returned them
    with `with_lse`. out and d_out may have any strides. A query that sees no key has gradient 0, and so has a key that no query sees. The
    variant `deterministic` gives the same bits at every call; the usual one adds dQ up in whatever order its programs come. A `design` sets
    every choice by itself. Raises UsageError, with the reason, for what the kernel does not take: beyond what the forward pass refuses,
    head dimensions above 128.
    """
    backward = prepare(q, k, v, out, lse, d_out, mask=mask, scale=scale, variant=variant, design=design)
    run(backward)
    return backward.dq, backward.dk, backward.dv


def flash_v3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    backward: str = "",
) -> torch.Tensor:
    """`flash_v3_forward` with gradients: (B, Hq, Sq, Dv), contiguous, in the dtype of q, k and v. `backward` names one of VARIANTS.

    Where no gradient is asked for, this is the forward kernel and nothing else. Gradients of gradients are refused by autograd. Raises
    UsageError, before anything runs, for what a pass that is asked for does not take.
    """
    options: dict[str, Any] = {"mask": mask, "scale": scale}
    if wants_gradients(q, k, v):
        design_for(q.shape[-1], v.shape[-1], backward)
    return attend(q, k, v, flash_v3_forward, flash_v3_backward, options, backward)


def launch_figures(backward: Backward) -> dict[str, Any]:
    """What a row's `launch` says of a backward pass; runs it once.

    The registers are those that a thread is launched with; consumers then take more of them, and the producer fewer (REGISTERS).
    """
    compiled = run(backward)
    design = asdict(backward.design)
    figures: dict[str, Any] = {
        "block_q": backward.design.block_q,
        "block_kv": backward.design.block_kv,
        "num_warps": 4 * backward.design.consumers + 4,
        "num_stages": design.pop("stages"),
        **design,
        "registers": compiled[0].n_regs,
        "spills": compiled[0].n_spills,
        "shared_bytes": compiled[0].metadata.shared,
    }
    if backward.query_blocks is not None:
        figures["queries"] = compiled_figures(backward.query_blocks, compiled[1])
    return figures
