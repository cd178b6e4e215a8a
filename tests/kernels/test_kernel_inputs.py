"""What the forward kernel refuses, and what it would launch; without a GPU, on tensors that have no memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashbench.errors import UsageError
from flashbench.kernels.inputs import check_inputs, visibility


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str, precision: str = "ieee") -> None:
    with pytest.raises(UsageError, match=message):
        check_inputs(q, k, v, precision)


def test_heads_that_do_not_divide_are_refused_by_number() -> None:
    refused(meta(1, 6, 8, 16), meta(1, 4, 8, 16), meta(1, 4, 8, 16), "6 query heads do not share 4")


def test_head_dimensions_above_256_are_refused_and_never_cut_off() -> None:
    refused(meta(1, 1, 8, 512), meta(1, 1, 8, 512), meta(1, 1, 8, 512), "head_dim 512 is above 256")
    refused(meta(1, 1, 8, 64), meta(1, 1, 8, 64), meta(1, 1, 8, 257), "head_dim 257 is above 256")


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 1, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)),
        ((1, 1, 8, 16), (1, 1, 8, 32), (1, 1, 8, 16)),
        ((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 9, 16)),
        ((1, 2, 8, 16), (1, 2, 8, 16), (1, 1, 8, 16)),
    ],
    ids=["batch", "head dim", "keys and values", "key and value heads"],
)
def test_shapes_of_different_problems_are_refused(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    refused(meta(*q), meta(*k), meta(*v), "do not belong to one attention problem")


def test_tensors_with_other_than_four_axes_are_refused() -> None:
    refused(meta(8, 16), meta(8, 16), meta(8, 16), "2, 2 and 2 axes")


def test_empty_tensors_are_refused() -> None:
    refused(meta(1, 1, 8, 16), meta(1, 1, 0, 16), meta(1, 1, 0, 16), "no axis may be empty")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_dtypes_without_a_kernel_are_refused(dtype: torch.dtype) -> None:
    x = meta(1, 1, 8, 16, dtype=dtype)
    refused(x, x, x, "one dtype of fp16, bf16, fp32")


def test_mixed_dtypes_are_refused() -> None:
    refused(meta(1, 1, 8, 16), meta(1, 1, 8, 16), meta(1, 1, 8, 16, dtype=torch.bfloat16), "share one dtype")


def test_tensors_on_two_devices_are_refused() -> None:
    refused(
        meta(1, 1, 8, 16), torch.zeros(1, 1, 8, 16, dtype=torch.float16), meta(1, 1, 8, 16), "move them to one device"
    )


def test_an_unknown_precision_is_refused_with_the_nearest_known() -> None:
    x = meta(1, 1, 8, 16)
    refused(x, x, x, "did you mean 'ieee'", "iee")


@pytest.mark.parametrize("mask", ["window:0", "window:-1", "windw:4"])
def test_a_window_that_shows_nothing_or_is_no_window_is_refused(mask: str) -> None:
    with pytest.raises(UsageError):
        visibility(mask, 100)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("none", (False, None)), ("causal", (True, None)), ("window:99", (True, 99)), ("window:100", (True, None))],
)
def test_a_window_over_all_keys_is_causal_and_no_more(mask: str, expected: tuple[bool, int | None]) -> None:
    assert visibility(mask, 100) == expected


@pytest.mark.parametrize("batch", [10922, 10923])
def test_any_number_of_heads_lies_on_the_first_axis_of_the_grid(batch: int) -> None:
    """The other two axes end at 65,535 (KF-09). In a child, since Triton settles at import whether it interprets."""
    program = f"""if True:
        import torch
        from flashbench.kernels.flash_v2 import prepare
        x = torch.empty({batch}, 6, 32, 16, dtype=torch.float16, device="meta")
        print(prepare(x, x, x).grid)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"({6 * batch},)", done.stderr
