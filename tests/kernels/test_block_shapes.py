"""Which block shape a device and a problem get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.errors import UsageError
from flashbench.kernels.blocks import candidate_blocks, default_blocks, padded, shared_bytes

KIB = 1024
DEVICES = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Compute capability to KiB of shared memory for one program."""

capabilities = st.sampled_from([*DEVICES, None])
dtypes = st.sampled_from(["bf16", "fp16", "tf32", "fp32"])
head_dims = st.integers(1, 256)


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(1, 16), (16, 16), (17, 32), (72, 128), (80, 128), (128, 128), (192, 256)]
)
def test_a_head_dimension_is_padded_to_a_power_of_two_of_at_least_16(head_dim: int, tile: int) -> None:
    assert padded(head_dim) == tile


@given(capability=capabilities, dtype=dtypes, head_dim=head_dims, head_dim_v=head_dims)
def test_a_default_that_fits_is_never_replaced_by_one_that_does_not(
    capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> None:
    limit = DEVICES.get(capability, 2**20) * KIB
    shape = default_blocks(capability, dtype, head_dim, head_dim_v, limit)
    assert shared_bytes(shape, capability, dtype, head_dim, head_dim_v) <= limit


@given(capability=capabilities, dtype=dtypes, head_dim=head_dims, kib=st.integers(1, 227))
def test_less_shared_memory_never_means_a_hungrier_shape(
    capability: tuple[int, int] | None, dtype: str, head_dim: int, kib: int
) -> None:
    def need(limit: int) -> int:
        return shared_bytes(
            default_blocks(capability, dtype, head_dim, head_dim, limit), capability, dtype, head_dim, head_dim
        )

    wanted = need(2**31)
    assert need(kib * KIB) <= max(wanted, kib * KIB)


def test_a_card_with_less_shared_memory_gets_a_smaller_shape() -> None:
    large = default_blocks((8, 0), "tf32", 128, 128, 167 * KIB)
    small = default_blocks((8, 0), "tf32", 128, 128, 99 * KIB)
    assert (small.block_q * small.block_kv) < (large.block_q * large.block_kv)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_tensors_that_no_descriptor_can_read_get_pointers(
    capability: tuple[int, int], dtype: str, head_dim: int
) -> None:
    limit = 227 * KIB
    assert default_blocks(capability, dtype, head_dim, head_dim, limit).descriptors
    assert not default_blocks(capability, dtype, head_dim, head_dim, limit, descriptors=False).descriptors


def test_a_gpu_older_than_ampere_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"compute capability 7\.5"):
        candidate_blocks((7, 5), "fp16", 64)
