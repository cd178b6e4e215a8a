"""What the tests of the forward kernel run: in a child that interprets, or in this process on a GPU. Plain data in, plain data out."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from problems import TORCH_DTYPES, AttentionProblem, Errors, errors, inputs

from flashbench.kernels.blocks import BlockShape


def start_interpreter() -> None:
    """First thing in a child that interprets."""
    from bf16_repair import repair

    torch.set_num_threads(1)
    repair()


def options_of(case: AttentionProblem) -> dict[str, Any]:
    precision = "tf32" if case.problem.dtype == "tf32" else "ieee"
    return {"mask": case.problem.mask, "scale": case.scale, "precision": precision}


def forward_errors(
    case: AttentionProblem, blocks: BlockShape | None = None, device: str = "cpu", seed: int = 0, with_lse: bool = True
) -> Errors:
    """Errors of the kernel on a problem against float64."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    q, k, v = inputs(case, device, seed)
    result = flash_v2_forward(q, k, v, with_lse=with_lse, blocks=blocks, **options_of(case))
    out, lse = result if with_lse else (result, None)
    return errors(case, q, k, v, out, lse)


def forward_values(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str = "fp32", device: str = "cpu", **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE for given values, (batch, heads, seq, channel) each."""
    from flashbench.kernels.flash_v2 import flash_v2_forward

    tensors = (torch.from_numpy(x).to(device, TORCH_DTYPES[dtype]) for x in (q, k, v))
    out, lse = flash_v2_forward(*tensors, with_lse=True, **options)
    return out.float().cpu().numpy(), lse.cpu().numpy()


def elements_written_beyond_the_end(
    case: AttentionProblem, blocks: BlockShape | None = None, device: str = "cpu"
) -> int:
    """How many elements the kernel wrote behind its output and LSE, which here are the start of larger buffers."""
    from flashbench.kernels import flash_v2

    untouched = -7.0
    q, k, v = inputs(case, device)
    launch = flash_v2.prepare(q, k, v, with_lse=True, blocks=blocks, **options_of(case))
    buffers = {
        id(tensor): torch.full((tensor.numel() + 4096,), untouched, dtype=tensor.dtype, device=device)
        for tensor in (launch.out, launch.lse)
        if tensor is not None
    }
    arguments = tuple(buffers.get(id(argument), argument) for argument in launch.arguments)
    flash_v2.run(launch._replace(arguments=arguments))
    return sum(int((buffer[-4096:] != untouched).sum()) for buffer in buffers.values())


def said_to_walk_down(mask: str, capability: tuple[int, int] | None) -> bool:
    """What the figures of a launch say of the way that its blocks walk, made for a GPU of this capability and interpreted."""
    from flashbench.kernels import flash_v2

    limits = flash_v2.device_limits(torch.device("cpu"))._replace(capability=capability)
    q = k = v = torch.zeros(1, 1, 64, 32)
    with mock.patch.object(flash_v2, "device_limits", return_value=limits):  # the process goes on to other tests
        return flash_v2.launch_figures(q, k, v, mask=mask, blocks=BlockShape(64, 32, 4, 1))["walks_down"]


def order_of_work(heads: int, q_blocks: int, sections: int, group: int, causal: bool) -> list[tuple[int, int]]:
    """The (head, query block) of each program in turn."""
    from order_kernel import record_order

    found = torch.full((heads * q_blocks, 2), -1, dtype=torch.int32)
    record_order[(heads * q_blocks,)](found, heads, q_blocks, sections, group, CAUSAL=causal)
    return [(head, q_block) for head, q_block in found.tolist()]


def bf16_product_is_exact() -> bool:
    """Whether this process's Triton multiplies bf16 matrices rightly (KF-14)."""
    from flashbench.kernels.interpreter import bf16_works

    return bf16_works()
