"""Which tile comes next, in flash-v3: the producer of a program decides, and tells the consumers through shared memory.

By itself: dealing all tiles out beforehand is blind. A section of a causal list ends with tiles of one block while the next begins with the
longest, and a multiprocessor that is held up keeps its whole hand. So a program's first tile is its own number, and every further one it draws
from a counter in global memory when it is about to need it, as FlashAttention-3's persistent schedulers do (hopper/tile_scheduler.hpp). The
counter needs no preparation: `tile_count` numbers are drawn in all, refusals included, and who draws the last one puts it back to 0.
"""

from __future__ import annotations

from flashbench.kernels.gluon_names import gl, gluon, mbarrier

# What is told of a tile: place of the numbers.
BATCH: gl.constexpr = gl.constexpr(0)
HEAD: gl.constexpr = gl.constexpr(1)
FIRST_ROW: gl.constexpr = gl.constexpr(2)
END: gl.constexpr = gl.constexpr(3)
DIAGONAL: gl.constexpr = gl.constexpr(4)
STEADY: gl.constexpr = gl.constexpr(5)
LOW: gl.constexpr = gl.constexpr(6)
NUMBERS: gl.constexpr = gl.constexpr(7)
ROOM: gl.constexpr = gl.constexpr(4)
"""Tiles told that have a place. The producer tells of tile t + 1 once all consumers have done with the Q of tile t - 2 (two places for Q), of which
they may still write the output, and which they read about there."""


@gluon.jit
def drawn(queue, programs, tile_count):
    """Place of the next tile of this program; tile_count or more when there is none. To be called until then, and not again."""
    number = gl.atomic_add(queue, 1, sem="relaxed")
    if number == tile_count - 1:
        gl.store(queue, 0)
    return programs + number


@gluon.jit
def write(told_tiles, turn, WHAT: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    told_tiles.index(turn % ROOM * NUMBERS + WHAT).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def tell(told_tiles, told_full, turn, batch, head_q, first_row, end, diagonal, steady, low):
    """The producer's side: what tile number `turn` of this program is; `end` 0 says that there is none."""
    write(told_tiles, turn, BATCH, batch)
    write(told_tiles, turn, HEAD, head_q)
    write(told_tiles, turn, FIRST_ROW, first_row)
    write(told_tiles, turn, END, end)
    write(told_tiles, turn, DIAGONAL, diagonal)
    write(told_tiles, turn, STEADY, steady)
    write(told_tiles, turn, LOW, low)
    mbarrier.arrive(told_full.index(turn % ROOM))


@gluon.jit
def told(told_tiles, turn, WHAT: gl.constexpr):
    """The consumer's side: a number of tile `turn`, once `await_tile` has been there. Read anew wherever it is needed, it takes no register."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(told_tiles.index(turn % ROOM * NUMBERS + WHAT).load(one), 0)


@gluon.jit
def await_tile(told_full, turn):
    mbarrier.wait(told_full.index(turn % ROOM), turn // ROOM & 1)
