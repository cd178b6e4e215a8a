"""What the probe of Triton's interpreter says of bf16, as it comes and repaired."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from forward_runs import bf16_product_is_exact

pytestmark = pytest.mark.interpreter


def test_the_probe_agrees_with_a_product_of_ones() -> None:
    """16 ones summed are 16; an interpreter that multiplies the bits of bf16 (16256 each) says otherwise, and the probe must say so."""
    program = """if True:
        import torch, triton, triton.language as tl
        from flashbench.kernels.interpreter import bf16_works, square_kernel
        product = torch.empty(16, 16)
        square_kernel[(1,)](torch.ones(16, 16, dtype=torch.bfloat16), product, N=16)
        print(bf16_works() == bool((product == 16).all()))
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_the_repaired_interpreter_passes_the_probe(interpreted: Any) -> None:
    assert interpreted(bf16_product_is_exact)


def rounded_like_torch(values: np.ndarray) -> bool:
    import torch
    from bf16_repair import bits_to_float, float_to_bits

    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    return bool(np.array_equal(bits_to_float(float_to_bits(values)), expected, equal_nan=True))


def test_the_repair_rounds_as_torch_does(interpreted: Any) -> None:
    ties = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40])
    many = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    assert interpreted(rounded_like_torch, np.concatenate([ties, many]))
