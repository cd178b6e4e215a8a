"""What a row's `launch` says of the kernels that ran counts before the schedule of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashbench.model.schedule import Schedule, as_launched

PLANNED = Schedule(128, 64, blocks_per_sm=2, backward_blocks_per_sm=2, dq_blocks_per_sm=2, walks_down=True)
TILES = {"block_q": 64, "block_kv": 32}
LIMIT = 227 * 1024
"""Shared memory of a block on sm_90."""


def kernel(shared_kib: int, num_warps: int = 4, registers: int = 128) -> dict[str, Any]:
    return {"shared_bytes": shared_kib * 1024, "num_warps": num_warps, "registers": registers}


def launched(launch: dict[str, Any], limit: int | None = LIMIT) -> Schedule:
    return as_launched(PLANNED, launch, limit)


@pytest.mark.parametrize(
    ("launch", "changes"),
    [
        (TILES, {}),
        (TILES | kernel(50), {"blocks_per_sm": 4}),
        (TILES | {"walks_down": False}, {"walks_down": False}),
        (TILES | {"keys": kernel(70), "queries": kernel(160)}, {"backward_blocks_per_sm": 3, "dq_blocks_per_sm": 1}),
        (TILES | {"one_pass": kernel(160)}, {"backward_blocks_per_sm": 1}),
    ],
    ids=["tiles", "forward", "direction", "backward in two passes", "backward in one"],
)
def test_what_a_launch_tells_replaces_what_was_planned(launch: dict[str, Any], changes: dict[str, Any]) -> None:
    assert launched(launch) == replace(PLANNED, block_q=64, block_kv=32, **changes)


@pytest.mark.parametrize("launch", [{}, {"block_q": 64}, {"block_q": 64, "block_kv": "wide"}, kernel(50)])
def test_without_tiles_nothing_is_known(launch: dict[str, Any]) -> None:
    assert launched(launch) == PLANNED


@pytest.mark.parametrize("keys", [None, 3, {"shared_bytes": 1024}, kernel(70) | {"registers": "many"}])
def test_a_kernel_of_which_too_little_is_told_is_taken_as_planned(keys: object) -> None:
    assert launched(TILES | {"keys": keys}).backward_blocks_per_sm == 2


def test_on_a_device_of_unknown_shared_memory_kernels_are_taken_as_planned() -> None:
    assert launched(TILES | kernel(50), None).blocks_per_sm == 2
