"""Which ceiling holds a point: the share of the time that each level or unit alone would have needed, and a sentence.

The roofline with one roof says "compute-bound" of nearly every fused attention and stops explaining; the exponential unit, the
L2, the launch and SMs without a block are the other roofs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashbench.hardware.ceilings import Ceiling, choose
from flashbench.model.flops import exponentials
from flashbench.model.interval import Traffic
from flashbench.records import Problem

NEAR = 0.5
"""A ceiling that explains less than half of the time is named as the nearest one, not as what holds the point."""


@dataclass(frozen=True, slots=True)
class Share:
    """One candidate. `share` is the part of the measured time that it alone accounts for; above 1 the ceiling is too low."""

    name: str
    """hbm, l2, compute, exp, launch or occupancy."""
    share: float
    ceiling: Ceiling | None
    """None for launch and occupancy."""
    detail: str = ""
    """What the share is made of, in words: blocks and waves."""


@dataclass(frozen=True, slots=True)
class Binding:
    """`name` is that of the largest share, or None when nothing could be assessed; `shares` are in falling order."""

    name: str | None
    shares: tuple[Share, ...]
    sentence: str


def occupancy(blocks: int, sm_count: int, blocks_per_sm: int = 1) -> float:
    """Share of the block slots that are filled over the waves of a launch: 133 blocks on 132 SMs fill 133 of 264."""
    slots = sm_count * blocks_per_sm
    return blocks / (-(-blocks // slots) * slots)


def bind(
    time_ms: float,
    problem: Problem,
    traffic: Traffic,
    flops: int,
    ceilings: Iterable[Ceiling],
    *,
    regime: str | None = None,
    sm_count: int | None = None,
    blocks: int | None = None,
    blocks_per_sm: int = 1,
    launch_ms: float | None = None,
    exps: int | None = None,
) -> Binding:
    """What holds a measured point. What is not known (no ceiling, SM count, blocks or launch time) is left out, not guessed.

    HBM counts the estimated bytes; the L2 counts `traffic.high`, since what is found in the L2 is read from it. Tensor cores count
    `flops`, the useful ones. Occupancy is the share of SM time without a block. `launch_ms` is the time of an empty kernel. `exps` is the problem's own number of
    exponentials unless given (0 for a matrix product alone).
    """
    known = tuple(ceilings)
    seconds = time_ms / 1000
    work = {
        "hbm": traffic.estimate / 1e9,
        "l2": traffic.high / 1e9,
        "compute": flops / 1e12,
        "exp": (exponentials(problem) if exps is None else exps) / 1e12,
    }
    shares = []
    for level, amount in work.items():
        ceiling = choose(known, level, problem.dtype, regime)
        if ceiling is not None and amount > 0:
            shares.append(Share(level, amount / ceiling.value / seconds, ceiling))
    if launch_ms is not None:
        shares.append(Share("launch", launch_ms / time_ms, None))
    if sm_count and blocks:
        slots = sm_count * blocks_per_sm
        waves = f"{blocks:,} blocks in {-(-blocks // slots):,} wave(s) of {slots:,}"
        shares.append(Share("occupancy", 1 - occupancy(blocks, sm_count, blocks_per_sm), None, waves))
    shares.sort(key=lambda s: s.share, reverse=True)
    if not shares:
        return Binding(None, (), "no ceiling of this device is known; measure its ceilings first")
    return Binding(shares[0].name, tuple(shares), _sentence(shares))


def _sentence(shares: list[Share]) -> str:
    first = shares[0]
    others = ", ".join(f"{_name(s)} {s.share:.0%}{_of(s)}" for s in shares[1:] if s.share >= 0.005)
    beside = f" ({others})" if others else ""
    roof = f" of {_value(first.ceiling)}" if first.ceiling else ""
    if first.share > 1:
        doubt = (
            "measure the ceiling again" if first.ceiling and first.ceiling.source == "measured" else _OVER[first.name]
        )
        return f"above its {_name(first)} ceiling: {first.share:.0%}{roof}; {doubt}{beside}"
    if first.share < NEAR:
        return (
            f"no ceiling is near; the nearest is {_name(first)} at {first.share:.0%}{roof}{beside}: "
            "the rest is latency, instruction issue, or work that the models do not count"
        )
    words = {
        "launch": f"the launch takes {first.share:.0%} of the time",
        "occupancy": f"{first.share:.0%} of the SM time has no block to run{_of(first)}",
    }.get(first.name, f"held by {_name(first)}: {first.share:.0%}{roof}")
    return words + beside


def _of(share: Share) -> str:
    return f" [{share.detail}]" if share.detail else ""


def _name(share: Share) -> str:
    if share.ceiling is not None and share.ceiling.dtype == "fp32":
        return "fp32-core"
    return _NAMES[share.name]


_NAMES = {
    "hbm": "HBM",
    "l2": "L2",
    "compute": "tensor-core",
    "exp": "exponential-unit",
    "launch": "launch",
    "occupancy": "empty SMs",
}
_OVER = {
    "hbm": "the working set may lie in the L2",
    "l2": "SMs that ask for the same rows at once are answered together, which the model does not know",
    "compute": "the clock may be above the data sheet's",
    "exp": "part of the exponentials may be computed as polynomials",
    "launch": "the empty kernel's time is not that of this launch",
    "occupancy": "",
}


def _value(ceiling: Ceiling) -> str:
    return f"{ceiling.value:,.4g} {ceiling.unit} ({ceiling.source})"
