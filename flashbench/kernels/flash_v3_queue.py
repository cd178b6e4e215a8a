"""The queue of tiles of flash-v3: one counter in global memory, from which the producer of each program draws, and two places in shared
memory through which it tells the consumers what it drew.

Dealing the tiles out beforehand is blind: a section of a causal list ends with tiles of one block and the next begins with the longest, and a
multiprocessor that is held up keeps its whole hand. So a program's first tile is its own number, and every further one it draws when it is
about to need it, as in FlashAttention-3's persistent schedulers (hopper/tile_scheduler.hpp). The counter needs no preparation: `tile_count`
numbers are drawn in all, the last program's refusals included, and who draws the last one puts the counter back to 0.
"""

from __future__ import annotations

from flashbench.kernels.gluon_names import gl, gluon, mbarrier

ONE_NUMBER: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def drawn(queue, programs, tile_count):
    """Place of the next tile of this program; tile_count or more when there is none. To be called until then, and not again."""
    number = gl.atomic_add(queue, 1, sem="relaxed")
    if number == tile_count - 1:
        gl.store(queue, 0)
    return programs + number


@gluon.jit
def tell(places, place_full, turn, place):
    """The producer's side: the place after that of tile number `turn`. Two numbers of room are enough: that for turn t is read before the
    consumers ask for the Q of turn t + 1, and the producer has waited until they had read that of turn t - 1 before it loaded that of t."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    places.index(turn % 2).store(gl.full([1], place, gl.int32, one))
    mbarrier.arrive(place_full.index(turn % 2))


@gluon.jit
def told(places, place_full, turn):
    """The consumer's side: the place after that of tile number `turn`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(place_full.index(turn % 2), turn // 2 & 1)
    return gl.sum(places.index(turn % 2).load(one), 0)
