"""Counters that launches share out among themselves."""

from __future__ import annotations

import torch

from flashbench.kernels.counters import APART, MOST, RING, next_counters

CPU = torch.device("cpu")


def places(count: int, launches: int) -> list[range]:
    """Addresses, in elements, of the counters of launches that follow one another."""
    starts = [next_counters(CPU, count).data_ptr() // 4 for _ in range(launches)]
    return [range(start, start + count) for start in starts]


def test_launches_that_follow_one_another_have_counters_of_their_own() -> None:
    for count in (1, 3, 100):
        taken = [number for place in places(count, 50) for number in place]
        assert len(set(taken)) == len(taken)


def test_the_ring_begins_anew_where_there_is_no_room_left() -> None:
    launches = RING // MOST
    starts = [place.start for place in places(MOST, 3 * launches)]
    last_lap, lap_before = set(starts[-launches:]), set(starts[-2 * launches : -launches])
    assert len(last_lap) == launches
    assert last_lap == lap_before
    assert all(len(next_counters(CPU, MOST)) >= MOST for _ in range(2 * launches))


def test_more_counters_than_the_ring_has_to_spare_are_made_for_the_launch() -> None:
    alone = [next_counters(CPU, MOST + 1) for _ in range(2)]
    assert all(counters.shape == (MOST + 1,) and not counters.any() for counters in alone)
    assert alone[0].data_ptr() != alone[1].data_ptr()


def test_counters_begin_at_a_multiple_of_16_bytes() -> None:
    first = places(1, 1)[0].start
    assert all((place.start - first) % APART == 0 for count in (1, 2, 5) for place in places(count, 3))
