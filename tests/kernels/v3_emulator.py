"""flash-v3's source run in Python: a thread for each role of a program, mbarriers and named barriers that really wait, NumPy for tiles.

Nothing of it is compiled, and no time passes as on a GPU; but it is the kernel as it stands, with its barriers, its order of work and its
numbers. It is run against the kernel: products are computed when they are waited for and not before, and a tile's store when its place is
asked for again, so that whatever is given back too early is overwritten. A wait that never ends is an error.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SECONDS = 20.0
"""A wait as long as this has no end."""
LONGEST_DELAY = 2e-4
"""Seconds by which any role is late at any barrier, so that roles overtake one another in all ways."""


class Array(np.ndarray):
    """A tensor, or a tile in shared memory, where reshaping and indexing give views."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Array:
        if bitcast:  # of bytes, to e4m3
            return array(torch.from_numpy(np.ascontiguousarray(self)).view(torch.float8_e4m3fn).float().numpy())
        if dtype == "int8":
            return self.astype(np.int8).view(Array)
        return self.astype(np.float16).astype(np.float32).view(Array) if dtype == "fp16" else self

    def index(self, i: int) -> Array:
        return self[i]

    def permute(self, order: tuple[int, ...]) -> Array:
        return self.transpose(order)

    def store(self, values: np.ndarray) -> None:
        self[...] = values

    def load(self, _layout: Any) -> Array:
        return self.copy()

    def slice(self, start: int, length: int, dim: int = 0) -> Array:
        return self[(slice(None),) * dim + (slice(start, start + length),)]


class Index(int):
    """A whole number of the kernel, which there has a type to convert."""

    def to(self, _dtype: Any) -> Index:
        return self


for name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "floordiv",
    "rfloordiv",
    "mod",
    "rmod",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
):
    operation = getattr(int, f"__{name}__")
    setattr(
        Index,
        f"__{name}__",
        lambda a, b, operation=operation: (
            Index(operation(a, b)) if isinstance(b, int) and not isinstance(b, np.generic) else NotImplemented
        ),
    )


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


class Waiting:
    """Something that threads wait for."""

    def __init__(self) -> None:
        self.condition = threading.Condition()

    def until(self, true: Callable[[], bool], what: str) -> None:
        if not self.condition.wait_for(true, SECONDS):
            raise TimeoutError(f"{threading.current_thread().name} waits for ever: {what}")


class Mbarrier(Waiting):
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.pending = self.bytes = self.phase = 0

    def change(self, arrivals: int, transferred: int) -> None:
        time.sleep(random.random() * LONGEST_DELAY)
        with self.condition:
            self.pending -= arrivals
            self.bytes += transferred
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        with self.condition:
            self.until(lambda: self.phase & 1 != parity, f"phase {self.phase} of an mbarrier")


class NamedBarrier(Waiting):
    """One of the block's named barriers, of as many threads as are said at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = self.generation = 0

    def meet(self, word: str, of_threads: int, threads: int) -> None:
        time.sleep(random.random() * LONGEST_DELAY)
        with self.condition:
            generation = self.generation
            self.arrived += threads
            assert self.arrived <= of_threads, "more threads at a named barrier than it has"
            if self.arrived == of_threads:
                self.arrived, self.generation = 0, generation + 1
                self.condition.notify_all()
            elif word == "sync":
                self.until(lambda: self.generation != generation, "a named barrier")


class Descriptor:
    """A tensor, such as (batch, heads, seq, channels), as the copy engine sees it: 0 beyond its end, and nothing written there."""

    layout = None

    def __init__(self, values: np.ndarray, rows: int, channels: int, dtype: str) -> None:
        self.values, self.shape, self.dtype = values, (rows, channels), dtype
        self.block_type = types.SimpleNamespace(nbytes=2 * rows * channels, shape=[1, 1, rows, channels])

    def parts(self, coordinates: list[int]) -> tuple[Any, tuple[slice, slice]]:
        *outer, row, column = coordinates
        there = self.values[(*outer, slice(row, row + self.shape[0]), slice(column, column + self.shape[1]))]
        return there, (slice(0, there.shape[0]), slice(0, there.shape[1]))


class Program:
    """One program of the grid: its named barriers, and what it has under way."""

    def __init__(self) -> None:
        self.named: dict[int, NamedBarrier] = {}
        self.lock = threading.Lock()
        self.mine = threading.local()

    def named_barrier(self, number: int, word: str, threads: int, warps: int) -> None:
        with self.lock:
            barrier = self.named.setdefault(int(number), NamedBarrier())
        barrier.meet(word, threads, 32 * warps)

    def under_way(self, what: str) -> list[Any]:
        return self.mine.__dict__.setdefault(what, [])

    def product(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> dict[str, Any]:
        def compute() -> Array:
            before = acc["value"] if isinstance(acc, dict) else acc
            return array(a @ b + (before if use_acc else 0)).astype(np.float32)

        token: dict[str, Any] = {"compute": compute}
        self.under_way("products").append(token)
        return token

    def product_wait(self, pending: int, deps: tuple[dict[str, Any], ...]) -> Any:
        products = self.under_way("products")
        while len(products) > pending:
            token = products.pop(0)
            token["value"] = token["compute"]()
        values = tuple(token["value"] if isinstance(token, dict) else token for token in deps)
        return values[0] if len(values) == 1 else values

    def load(self, source: Descriptor, coordinates: list[int], barrier: Mbarrier, tile: Array) -> None:
        there, part = source.parts(coordinates)
        whole = tile.reshape(source.shape)
        whole[...] = 0
        whole[part] = there
        barrier.change(0, -source.block_type.nbytes)

    def store(self, target: Descriptor, coordinates: list[int], tile: Array) -> None:
        there, part = target.parts(coordinates)
        self.under_way("stores").append((there, tile.reshape(target.shape)[part], False))

    def add(self, target: Descriptor, coordinates: list[int], tile: Array) -> None:
        there, part = target.parts(coordinates)
        self.under_way("stores").append((there, tile.reshape(target.shape)[part], True))

    def store_wait(self, pending: int) -> None:
        stores = self.under_way("stores")
        while len(stores) > pending:
            there, tile, adds = stores.pop(0)
            there[...] = there + tile if adds else tile


class Pointer:
    def __init__(self, values: np.ndarray, offset: Any = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.offset + offset)


def language(program: int, programs: int) -> types.SimpleNamespace:
    """As much of Gluon as the kernel uses."""

    def store(pointer: Pointer, values: Any, mask: Array | None = None) -> None:
        if mask is None:
            pointer.values[pointer.offset] = values
        else:
            pointer.values[pointer.offset[mask]] = values[mask]

    def atomic_add(pointer: Pointer, value: int, sem: str) -> Index:
        before = Index(pointer.values[pointer.offset])
        pointer.values[pointer.offset] += value
        return before

    def load(pointer: Pointer, mask: bool, other: float) -> np.float32:
        return np.float32(pointer.values[pointer.offset] if mask else other)

    def full(shape: list[int], value: Any, dtype: str, _layout: Any) -> Array:
        return array(np.full(shape, value, np.int32 if dtype == "int32" else np.float32))

    def add_up(x: Array, axis: int) -> Any:
        return Index(x.sum()) if x.dtype == np.int32 else array(x.sum(axis))

    def allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
        if dtype == "int64":
            barriers = [Mbarrier() for _ in range(shape[0])]
            return types.SimpleNamespace(index=barriers.__getitem__)
        unwritten = np.full(shape, -1, np.int32) if dtype == "int32" else np.full(shape, np.nan, np.float32)
        return Memory(unwritten.view(Array), dtype)

    def specialise(roles: list[tuple[Any, tuple[Any, ...]]], _warps: Any, _registers: Any) -> None:
        failures: list[BaseException] = []

        def act(function: Any, arguments: tuple[Any, ...]) -> None:
            try:
                with np.errstate(all="ignore"):
                    function(*arguments)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=act, args=role, name=f"role {i}") for i, role in enumerate(roles)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def nothing(*_: Any, **__: Any) -> None:
        """A layout: where the elements of a tensor lie."""

    return types.SimpleNamespace(
        program_id=lambda _: Index(program), num_programs=lambda _: Index(programs), cdiv=lambda a, b: -(-a // b), static_range=range,
        int8="int8", int32="int32", int64="int64", float32="float32", float8e4nv="e4m3",
        SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing, BlockedLayout=nothing,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=nothing),
        arange=lambda a, b, layout: array(np.arange(a, b)), zeros=lambda shape, *_: array(np.zeros(shape, np.float32)),
        full=full, atomic_add=atomic_add, convert_layout=lambda x, _, **__: x,
        where=lambda c, a, b: array(np.where(c, np.float32(a) if np.isscalar(a) else a, np.float32(b) if np.isscalar(b) else b)),
        maximum=lambda a, b: np.maximum(a, b) if np.isscalar(a) else array(np.maximum(a, b)), max=lambda x, axis: array(x.max(axis)), min=lambda x, axis: array(x.min(axis)),
        sum=add_up, exp2=lambda x: array(np.exp2(x)), log2=lambda x: array(np.log2(x)),
        store=store, load=load, minimum=min, split=lambda x: (x[..., 0], x[..., 1]), join=lambda a, b: array(np.stack([a, b], -1)), allocate_shared_memory=allocate, warp_specialize=specialise, constexpr=None,
    )  # fmt: skip


class Memory:
    """Tiles in shared memory."""

    def __init__(self, values: Array, dtype: str) -> None:
        self.values, self.dtype = values, dtype

    def index(self, i: int) -> Array:
        return self.values[int(i)].view(Array)


def as_e4m3(values: np.ndarray) -> torch.Tensor:
    """Rounded to even, and to 448 where they are beyond it, as `cvt.rn.satfinite` does."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)


def word_of(*numbers: np.ndarray) -> Array:
    """As flash_v3_e4m3.word_of: four numbers in e4m3, in the bytes of a word."""
    return array(torch.stack([as_e4m3(x) for x in numbers], -1).view(torch.int32)[..., 0].numpy())


def in_python(program: int, programs: int, kernel: str = "flash_v3") -> dict[str, Any]:
    """The functions of a kernel's module, and of those that it imports, as plain Python for one program."""
    from flashbench.kernels import (
        flash_v3_barriers,
        flash_v3_consumer,
        flash_v3_e4m3,
        flash_v3_producer,
        flash_v3_queue,
        flash_v3_schedule,
        flash_v3_softmax,
        schedule,
    )

    this = Program()

    scope: dict[str, Any] = {
        "gl": language(program, programs),
        "tl": types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b)),
        "mbarrier": types.SimpleNamespace(
            init=lambda b, count: b.__dict__.update(count=count, pending=count), wait=lambda b, parity, pred=True: b.wait(parity) if pred else None,
            expect=lambda b, size: b.change(1, size), arrive=lambda b: b.change(1, 0), MBarrierLayout=lambda: None,
        ),
        "warpgroup_mma": this.product, "warpgroup_mma_wait": this.product_wait, "load_tile": this.load, "store_tile": this.store,
        "add_tile": this.add, "product_under_way": lambda x: x, "store_wait": this.store_wait, "named_barrier": this.named_barrier, "pin": lambda _: None,
        "multiplied_unless_1": lambda acc, factors: acc * factors,
        "fence_async_shared": lambda: None, "partition_barrier": lambda: None, "rows_of": lambda _: None, "word_of": word_of,
        "LN_2": np.float32(np.log(2)), "ROWS": 64, "TURN": flash_v3_barriers.TURN.value, "RELEASE": flash_v3_barriers.RELEASE.value,
        "KEYS": 64, "HALF": 64, "EXCHANGE": 8,
    }  # fmt: skip
    kernel_module = importlib.import_module(f"flashbench.kernels.{kernel}")
    for module in (
        kernel_module, schedule, flash_v3_schedule, flash_v3_barriers, flash_v3_e4m3, flash_v3_queue, flash_v3_producer, flash_v3_consumer,
        flash_v3_softmax,
    ):  # fmt: skip
        for name, value in vars(module).items():
            if hasattr(value, "fn") and name not in scope and not (module is schedule and name == "visible"):
                scope[name] = types.FunctionType(value.fn.__code__, scope, name)
            elif name.isupper() and hasattr(value, "value"):  # a constant of the kernels'
                scope.setdefault(name, value.value)
    return scope


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: str, scale: float, programs: int, consumers: int = 2, block_kv: int = 64,
    stages: int = 2, sections: int = 1, out_tiles: bool = True, descales: np.ndarray | None = None, broken: dict[str, Any] | None = None,
    **switches: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Output and log-sum-exp of the kernel for q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D), D one of 64, 128, 256, in `programs` programs.

    With `descales` (B, Hkv, 3) all of them are e4m3, and v is (B, Hkv, D, Skv or more), its keys in the kernel's order. `broken` puts other
    functions in place of the kernel's.
    """
    batch, heads_q, seq_q, d = q.shape
    heads_kv, seq_kv = k.shape[1:3]
    window = int(mask.removeprefix("window:")) if mask.startswith("window:") else 0
    inside = 0 < window < seq_kv
    out = np.full(q.shape, np.nan, np.float32)
    lse = np.full(batch * heads_q * seq_q, np.nan, np.float32)
    tiles = batch * heads_q * -(-seq_q // (64 * consumers))
    group = heads_q // heads_kv
    queue = np.zeros(1, np.int64)
    dtype, v_tile, units = "fp32", (block_kv, d), None
    if descales is not None:
        dtype, v_tile, units = "e4m3", (d, block_kv), Pointer(descales.reshape(-1))
    for program in range(min(programs, tiles)):
        scope = in_python(program, min(programs, tiles))
        scope.update(broken or {})
        scope["flash_v3_kernel"](
            Descriptor(q, 64, d, dtype), Descriptor(k, block_kv, d, dtype), Descriptor(v, *v_tile, dtype),
            Descriptor(out, 64, d, "fp32"), Pointer(lse), Pointer(queue), units,
            *map(Index, (batch * heads_q, heads_q, group, seq_q, seq_kv, window, min(sections, batch * heads_kv), tiles)), np.float32(scale * np.log2(np.e)),
            CONSUMERS=consumers, D=d, DV=d, BLOCK_KV=block_kv, STAGES=stages, CAUSAL=mask != "none", WINDOW=inside,
            TAIL=mask == "none" and seq_kv % block_kv != 0, NEGATIVE_SCALE=scale < 0, WITH_LSE=True, OUT_TILES=out_tiles,
            CONSUMER_REGISTERS=0, PRODUCER_REGISTERS=0,
            **{"OVERLAP": True, "PINGPONG": False, "LONGEST_FIRST": mask != "none", "QUEUE": False, "CARRY": False, "LAZY_RESCALE": False, "EARLY_WAIT": False, "NAMED_RELEASE": False, **switches},
        )  # fmt: skip
    assert queue[0] == 0, "the queue is not as it was"
    return out, lse.reshape(batch, heads_q, seq_q)


def differentiate(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, lse: np.ndarray, delta: np.ndarray, *, mask: str, scale: float,
    halves: int = 1, stages: int = 2, sections: int = 1, with_dq: bool = True, broken: dict[str, Any] | None = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """dQ, dK and dV of the backward kernel, for lse (natural) and delta (B, Hq, Sq), D one of 64 and 128."""
    batch, heads_q, seq_q, d = q.shape
    heads_kv, seq_kv = k.shape[1:3]
    window = int(mask.removeprefix("window:")) if mask.startswith("window:") else 0
    inside = 0 < window < seq_kv
    padded = -(-seq_q // 128) * 128
    rows = np.full((2, batch * heads_q, padded), 0.0, np.float32)
    rows[0] = np.inf
    flat = lse.reshape(-1, seq_q)
    rows[0, :, :seq_q] = np.where(flat == -np.inf, np.inf, flat * np.log2(np.e))
    rows[1, :, :seq_q] = delta.reshape(-1, seq_q)
    sums = np.zeros(q.shape, np.float32)
    dk, dv = np.full(k.shape, np.nan, np.float32), np.full(v.shape, np.nan, np.float32)
    programs = batch * heads_kv * -(-seq_kv // 128)
    for program in range(programs):
        scope = in_python(program, programs, "flash_v3_backward")
        scope.update(broken or {})
        scope["flash_v3_backward_kernel"](
            Descriptor(q, 64, d, "fp32"), Descriptor(k, 64, d, "fp32"), Descriptor(v, 64, d, "fp32"), Descriptor(d_out, 64, d, "fp32"),
            Descriptor(rows[0], 1, 64, "fp32"), Descriptor(rows[1], 1, 64, "fp32"),
            Descriptor(sums, 64, d // 2 if halves == 1 else d, "fp32"), Descriptor(dk, 64, d, "fp32"), Descriptor(dv, 64, d, "fp32"),
            *map(Index, (batch * heads_kv, heads_kv, heads_q // heads_kv, seq_q, seq_kv, window, min(sections, batch * heads_kv))),
            np.float32(scale), np.float32(scale * np.log2(np.e)),
            CONSUMERS=2, D=d, HALVES=halves, STAGES=stages, CAUSAL=mask != "none", WINDOW=inside,
            TAIL=mask == "none" and seq_kv % 128 != 0, WITH_DQ=with_dq, CONSUMER_REGISTERS=0, PRODUCER_REGISTERS=0,
        )  # fmt: skip
    return sums * np.float32(scale), dk, dv
