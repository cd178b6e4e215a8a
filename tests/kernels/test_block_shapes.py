"""Which block shape a device and a problem get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.errors import UsageError
from flashbench.kernels import blocks
from flashbench.kernels.blocks import (
    USES,
    BlockShape,
    block_table,
    candidate_blocks,
    default_blocks,
    padded,
    parse_shape,
    read_table,
    shared_bytes,
    use_of,
)

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


LISTS = {
    f"{kernel}, {family} {kind} {width}": shapes
    for kernel, families in block_table().items()
    for family, kinds in families.items()
    for kind, widths in kinds.items()
    for width, shapes in widths.items()
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_the_table_has_each_shape_once_and_one_that_any_tensor_can_use(name: str) -> None:
    shapes = LISTS[name]
    assert len(set(shapes)) == len(shapes)
    assert any(not shape.descriptors for shape in shapes)
    for shape in shapes:
        assert shape.num_warps in (1, 2, 4, 8, 16)
        assert all(side & (side - 1) == 0 for side in (shape.block_q, shape.block_kv))


@pytest.mark.parametrize("name", [name for name in LISTS if ", sm_80 " in name])
def test_no_shape_for_ampere_loads_through_descriptors_that_it_lacks(name: str) -> None:
    assert not any(shape.descriptors for shape in LISTS[name])


shapes = st.builds(
    BlockShape,
    *(st.integers(1, most) for most in (512, 512, 16, 9)),
    descriptors=st.booleans(),
    use=st.sampled_from(["", *USES]),
)


@given(shapes)
def test_a_shape_reads_back_as_it_is_written(shape: BlockShape) -> None:
    assert parse_shape(shape.row()) == shape


@pytest.mark.parametrize(
    "row",
    [
        "",
        "128x64",
        "128x64 w4",
        "128 x 64 w4 s2",
        "128x64 w4 s2 tmma",
        "128x64 w4 s2 late",
        "128x64 w4 s2 short dense",
        "128x64 s2 w4",
    ],
)
def test_a_row_that_is_no_shape_is_refused_with_how_one_is_written(row: str) -> None:
    with pytest.raises(UsageError, match="is no block shape; one is written as 128x64 w4 s3"):
        parse_shape(row)


TABLE = """
wide:
  sm_90:
    half:
      64: [64x64 w4 s2 tma, 64x32 w4 s2]
  any:
    half:
      64: [16x16 w4 s1]
      256: [32x32 w4 s1]
    ieee:
      64: [16x32 w4 s1]
descriptors only:
  any: {any: {256: [64x64 w4 s2 tma]}}
kept:
  any: {any: {256: [64x32 w4 s2 tma, 64x64 w4 s1 tma dense, 32x32 w4 s2, 16x16 w4 s1 short]}}
empty: {}
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_table(TABLE)
    monkeypatch.setattr(blocks, "block_table", lambda: found)
    default_blocks.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        ((9, 0), "bf16", 64, "64x64 w4 s2 tma"),
        ((8, 0), "bf16", 64, "16x16 w4 s1"),
        ((9, 0), "bf16", 128, "32x32 w4 s1"),
        ((9, 0), "fp32", 64, "16x32 w4 s1"),
    ],
    ids=["its own", "those of any family", "the next wider", "those of any family for its kind"],
)
def test_a_kernel_reads_the_rows_that_fit_it_best(
    table: None, capability: tuple[int, int], dtype: str, head_dim: int, expected: str
) -> None:
    assert candidate_blocks(capability, dtype, head_dim, "wide")[0].row() == expected


def test_a_kernel_without_rows_is_an_error_that_says_where_they_belong(table: None) -> None:
    with pytest.raises(
        UsageError, match=r"no block shapes of 'empty' for sm_90, half, head_dim 64 in block_shapes.yaml"
    ):
        candidate_blocks((9, 0), "bf16", 64, "empty")


def test_an_unknown_kernel_is_an_error_with_the_nearest(table: None) -> None:
    with pytest.raises(UsageError, match="did you mean 'wide'"):
        candidate_blocks((9, 0), "bf16", 64, "wid")


@pytest.mark.parametrize(("capability", "readable"), [((9, 0), False), ((8, 0), True), ((12, 0), True)])
def test_tensors_or_gpus_for_which_a_list_has_no_shape_are_an_error(
    table: None, capability: tuple[int, int], readable: bool
) -> None:
    with pytest.raises(UsageError, match="which these tensors or this GPU do not allow"):
        default_blocks(capability, "bf16", 64, 64, 2**20, descriptors=readable, kernel="descriptors only")


def test_a_kernel_chooses_by_its_own_estimate_of_shared_memory(table: None) -> None:
    def need(shape: BlockShape, *_problem: object) -> int:
        return 1000 if shape.descriptors else 100

    assert default_blocks((9, 0), "bf16", 64, 64, 1000, kernel="wide", need=need).descriptors
    assert not default_blocks((9, 0), "bf16", 64, 64, 999, kernel="wide", need=need).descriptors


@pytest.mark.parametrize(
    ("use", "readable", "expected"),
    [
        ("dense", True, "64x64 w4 s1 tma dense"),
        ("short", True, "16x16 w4 s1 short"),
        ("long", True, "64x32 w4 s2 tma"),
        ("", True, "64x32 w4 s2 tma"),
        ("dense", False, "32x32 w4 s2"),
    ],
    ids=["its own", "another", "none of its own", "no use", "no descriptors"],
)
def test_a_shape_kept_for_a_use_comes_first_there_and_is_none_elsewhere(
    table: None, use: str, readable: bool, expected: str
) -> None:
    found = default_blocks((9, 0), "bf16", 64, 64, 2**20, descriptors=readable, use=use, kernel="kept")
    assert found.row() == expected


@pytest.mark.parametrize(
    ("masked", "mean_keys", "use"),
    [(False, 64, "dense"), (False, 1000, "dense"), (False, 1001, "long"), (True, 512, "short"), (True, 513, ""), (True, 1001, "long")],
)  # fmt: skip
def test_what_a_problem_is_for_the_table(masked: bool, mean_keys: float, use: str) -> None:
    assert use_of(masked, mean_keys, row_bytes=10, l2_bytes=20_000) == use
