"""The sums of dQ: zeros before flash-v3's backward kernel adds to them, and dQ of them behind it; in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.interpreter

UNTOUCHED = -7.0


def zeroed(seq: int, head_dim: int, head_dim_v: int) -> list[int]:
    """How many sums are not 0, and how many numbers behind them are not as they were, after the pre-pass for 2 x 3 heads."""
    from flashbench.kernels.blocks import padded
    from flashbench.kernels.flash_v2_launches import statistics_launch

    out, d_out = (torch.randn(2, 3, seq, head_dim_v) for _ in range(2))
    count = 6 * seq * head_dim
    buffer = torch.full((count + 4096,), UNTOUCHED)
    sums = buffer[:count].view(2, 3, seq, head_dim)
    launch = statistics_launch(out, d_out, torch.zeros(2, 3, seq))
    to_zero = {"sums": sums, "HEAD_DIM": head_dim, "D": padded(head_dim)}
    launch.kernel[launch.grid](*launch.arguments, **launch.constants, **to_zero)
    delta = launch.arguments[4].view(2, 3, -1)[..., :seq]
    assert torch.allclose(delta, (out * d_out).sum(-1), atol=1e-5)
    return [int((sums != 0).sum()), int((buffer[count:] != UNTOUCHED).sum())]


def finished(count: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """dQ of `count` sums, what it should be, and how many numbers behind it were written."""
    from flashbench.kernels.flash_v3_sums import sums_launch

    sums = torch.randn(count)
    buffer = torch.full((count + 4096,), UNTOUCHED, dtype=dtype)
    dq = buffer[:count]
    launch = sums_launch(sums, dq, scale)
    launch.kernel[launch.grid](*launch.arguments, **launch.constants)
    return dq, (sums * scale).to(dtype), int((buffer[count:] != UNTOUCHED).sum())


@pytest.mark.parametrize(("seq", "head_dim", "head_dim_v"), [(1, 64, 64), (200, 72, 128), (128, 128, 8)])
def test_the_pre_pass_zeroes_all_sums_and_nothing_behind_them(
    interpreted: Any, seq: int, head_dim: int, head_dim_v: int
) -> None:
    assert interpreted(zeroed, seq, head_dim, head_dim_v) == [0, 0]


@pytest.mark.parametrize("count", [8, 4096, 10_008])
@pytest.mark.parametrize("scale", [0.125, -0.3, 0.0])
def test_dq_is_the_sums_times_the_scale_in_its_dtype_and_nothing_behind_it_is_written(
    interpreted: Any, count: int, scale: float
) -> None:
    dq, wanted, behind = interpreted(finished, count, scale, torch.float16)
    assert torch.equal(dq, wanted)
    assert behind == 0
