"""A provider that does more work: every call is followed by another one on a part of the same problem, whose result is thrown away.

    slowed-1024x208:sdpa-flash      sdpa-flash, and again for the last 1,024 queries of every head over the first 208 keys, unmasked

This is what the gate's self-test must find: a real kernel doing real work, on the device, through the whole path. How much slower it
is depends on the device, so the self-test measures it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from flashbench.errors import UsageError
from flashbench.providers import table
from flashbench.providers.spec import Bound, Provider
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"slowed-(?P<queries>\d+)x(?P<keys>\d+):(?P<provider>\S+)")


def slowed_name(provider: str, queries: int, keys: int) -> str:
    """The name of `provider` with the extra work of `queries` queries over `keys` keys."""
    return f"slowed-{queries}x{keys}:{provider}"


def is_slowed(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def get(name: str) -> Provider:
    """The provider called `name`; UsageError when the one that it slows does not exist."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"'{name}' is not a slowed provider; one reads like 'slowed-1024x208:sdpa-flash'")
    provider = table.get(found["provider"])
    queries, keys = int(found["queries"]), int(found["keys"])

    def unsupported(problem: Problem, device: Device) -> str | None:
        if problem.mode not in ("forward", "decode"):
            return "only a forward pass can be slowed: its extra work is no part of the graph"
        if provider.computes != "attention":
            return "only attention can be slowed, not a matrix product alone"
        if problem.dtype == "fp8":
            return "fp8 inputs are not cut into parts, so that nothing is computed a second time"
        if problem.page_size is not None:
            return "a paged cache is not cut into parts, so that nothing is computed a second time"
        if not (0 < queries <= problem.seq_q and 0 < keys <= problem.seq_kv):
            return f"a problem of {problem.seq_q} queries and {problem.seq_kv} keys has no part of {queries} x {keys}"
        return provider.unsupported(problem, device) or provider.unsupported(part(problem, queries, keys), device)

    return dataclasses.replace(
        provider,
        name=name,
        summary=f"{provider.name} with extra work of {queries} queries over {keys} keys",
        unsupported=unsupported,
        loader="flashbench.providers.slowed:bind",
        source=name,
    )


def part(problem: Problem, queries: int, keys: int) -> Problem:
    """The problem that is computed once more."""
    return dataclasses.replace(problem, seq_q=queries, seq_kv=keys, mask="none")


def bind(problem: Problem, device: Device, source: str) -> Bound:
    """The slowed provider's call and its extra work, in this order: the output of the first is returned."""
    found = _NAME.fullmatch(source)
    assert found is not None
    provider = table.get(found["provider"])
    queries, keys = int(found["queries"]), int(found["keys"])
    bound = provider.bind(problem, device)
    extra = provider.bind(part(problem, queries, keys), device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = bound.call(q, k, v)
        extra.call(q[:, :, -queries:], k[:, :, :keys], v[:, :, :keys])
        return out

    return dataclasses.replace(bound, call=call)
