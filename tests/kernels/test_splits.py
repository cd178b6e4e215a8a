"""How many splits a decoding problem gets on a device, and what its kernel refuses; without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.kernels.splits import MAX_WAVES, SPLIT_KEYS, split_count
from flashbench.model.schedule import programs_per_sm

KIB = 1024
counts = st.integers(1, 4096)
keys = st.integers(1, 2**20)
blocks = st.sampled_from([16, 32, 64, 128])
slots = st.integers(1, 1024)


@given(units=counts, keys=keys, block_kv=blocks, slots=slots)
def test_every_split_has_a_block_and_no_more_run_than_a_few_waves(
    units: int, keys: int, block_kv: int, slots: int
) -> None:
    splits = split_count(units, keys, block_kv, slots)
    key_blocks = -(-keys // block_kv)
    assert 1 <= splits <= key_blocks
    assert splits == 1 or units * splits <= MAX_WAVES * slots
    assert all((i + 1) * key_blocks // splits > i * key_blocks // splits for i in range(min(splits, 200)))


@given(units=counts, keys=keys, block_kv=blocks, slots=slots)
def test_splits_are_not_much_shorter_than_is_worth_a_program(units: int, keys: int, block_kv: int, slots: int) -> None:
    splits = split_count(units, keys, block_kv, slots)
    assert splits == 1 or splits <= -(-keys // SPLIT_KEYS)


@given(units=counts, keys=keys, block_kv=blocks, slots=slots)
def test_one_split_fewer_would_make_the_longest_one_longer(units: int, keys: int, block_kv: int, slots: int) -> None:
    splits, key_blocks = split_count(units, keys, block_kv, slots), -(-keys // block_kv)
    assert splits == 1 or -(-key_blocks // (splits - 1)) > -(-key_blocks // splits)


@pytest.mark.parametrize(
    ("batch", "heads_kv", "keys", "splits"),
    [(1, 8, 131072, 49), (1, 8, 8192, 32), (16, 8, 8192, 3), (64, 8, 8192, 3), (512, 8, 8192, 1), (1, 8, 100, 1)],
)
def test_the_splits_of_usual_caches_on_132_multiprocessors_of_three_programs(
    batch: int, heads_kv: int, keys: int, splits: int
) -> None:
    """Few heads: as many as there are places; more: so many that the last wave is nearly full; very many heads, or few keys: one."""
    assert split_count(batch * heads_kv, keys, 64, 3 * 132) == splits


def test_a_device_with_more_places_never_gets_fewer_splits_for_one_head() -> None:
    found = [split_count(1, 2**20, 64, slots) for slots in range(1, 500)]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("shared_kib", "limit_kib", "warps", "registers", "programs"),
    [(74, 227, 4, 72, 3), (106, 227, 4, 72, 2), (200, 227, 4, 72, 1), (300, 227, 4, 72, 1), (10, 227, 4, 168, 3), (1, 227, 8, 32, 6)],
)  # fmt: skip
def test_a_multiprocessor_holds_as_many_programs_as_memory_registers_and_threads_allow(
    shared_kib: int, limit_kib: int, warps: int, registers: int, programs: int
) -> None:
    assert programs_per_sm(shared_kib * KIB, limit_kib * KIB, warps, registers) == programs


REFUSED = {
    "flash_decode(q, pages, pages, table.long())": "page_table must be contiguous int32",
    "flash_decode(q, pages, pages, table[:1])": "for a batch of 2",
    "flash_decode(q, pages, pages[:4], table)": "k has 9 pages and v 4",
    "flash_decode(q, pages.expand(9, 3, 16, 32), pages.expand(9, 3, 16, 32), table)": "4 query heads do not share 3",
    "flash_decode(q, k, k, lengths=lengths.expand(3))": r"lengths must be contiguous int32 \(batch,\)",
    "flash_decode(q, k, k, lengths=lengths[:1].expand(2).double())": "it is torch.float64",
    "flash_decode(q, k, k, splits=0)": "splits must be at least 1, not 0",
    "flash_decode(q, k, k, mask='window:0')": "window:0",
    "flash_decode(q[..., :16], k, k)": "do not belong to one attention problem",
}


def test_what_does_not_fit_together_is_refused_in_words() -> None:
    """In a child, since Triton settles at import whether it interprets; nothing is launched."""
    program = f"""if True:
        import re, torch
        from flashbench.errors import UsageError
        from flashbench.kernels.flash_decode import flash_decode
        q, k = torch.zeros(2, 4, 1, 32), torch.zeros(2, 2, 64, 32)
        pages, table = torch.zeros(9, 1, 16, 32), torch.zeros(2, 4, dtype=torch.int32)
        lengths = torch.zeros(1, dtype=torch.int32)
        for call, message in {REFUSED!r}.items():
            try:
                eval(call)
            except UsageError as refusal:
                assert re.search(message, str(refusal)), (call, str(refusal))
            else:
                raise AssertionError(call)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
