"""What Gluon has no call for, in a line of PTX each: the block's named barriers, and pins that keep work in front of a wait.

Source: PTX ISA, "bar" (sync waits for as many threads as it names, arrive is counted among them and goes on) and "mbarrier".
"""

from __future__ import annotations

from flashbench.kernels.gluon_names import gl, gluon, mbarrier

# Named barriers of the block, of which there are 16: Triton takes 0, 1, and one for each further role from 2 on.
TURN: gl.constexpr = gl.constexpr(5)
RELEASE: gl.constexpr = gl.constexpr(8)


@gluon.constexpr_function
def barrier_text(word, threads):
    return f"bar.{word} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(number, WORD: gl.constexpr, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Wait at one of the block's named barriers (WORD sync), or be counted there and go on (arrive): Gluon has no call for either."""
    TEXT: gl.constexpr = barrier_text(WORD, THREADS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    of_thread = gl.full([32 * WARPS], number, gl.int32, layout)
    gl.inline_asm_elementwise(TEXT, "=r,r", [of_thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pin(values):
    """Keep what gives these numbers in front of the wait that follows.

    The assembler sees no reason to, and moves the wait up, in front of the softmax, which then has no product of its own warpgroup to run
    beside. An instruction with an effect, which the largest fp32 number would trigger (there is none), it may not move; and it needs the numbers.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.f32 q, $1, 0f7F7FFFFF; @q bar.arrive 15, 256; } mov.b32 $0, $1;",
        "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release(empty, stage, barrier, NAMED_RELEASE: gl.constexpr, CONSUMERS: gl.constexpr):
    """Tell the producer that this consumer has read a tile: through the tile's mbarrier, before which Triton lets the warpgroup meet, or
    through a named barrier, where each warp is counted as it comes by."""
    if NAMED_RELEASE:
        named_barrier(barrier + stage, "arrive", 128 * CONSUMERS + 32, 4)
    else:
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def await_release(empty, stage, barrier, lap, NAMED_RELEASE: gl.constexpr, CONSUMERS: gl.constexpr):
    """The producer's side of it: wait until all consumers have read what it loaded one `lap` ago; the first lap finds all empty."""
    if NAMED_RELEASE:
        if lap > 0:
            named_barrier(barrier + stage, "sync", 128 * CONSUMERS + 32, 1)
    else:
        mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
