"""What each property of the byte model's L2 is worth, on the counts in results/: `python tests/compare_l2_models.py`, half a minute, no GPU.

One property at a time is taken back, and the bytes read of every counted case compared with the counters once more: docs/byte-model.md has the
table. One head of 524,288 keys (taken in step whatever the model), and decoding (nothing is read twice), are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from test_counters import COUNTED

from flashbench.analysis.counted import compare
from flashbench.model import l2, tiled
from flashbench.providers.table import get

OFF = 0.05
CASES = {key: case for key, case in COUNTED.items() if "524288" not in key and " decode " not in key}


class Renewed(dict[int, tuple[int, bool]]):
    """A partition that moves what is looked up to the end."""

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            return False
        self[key] = self.pop(key)
        return True


class LeastRecentlyUsed(l2.L2):
    def __init__(self, size_bytes: int, partitions: int) -> None:
        super().__init__(size_bytes, partitions)
        self.parts = [Renewed() for _ in range(partitions)]


def errors(**schedule: Any) -> dict[str, float]:
    """The model's error of the bytes read, as a share, of every case; `schedule` is changed in every provider's."""
    for replayed in (tiled._keys_again, tiled._backward_replayed):
        replayed.cache_clear()
    found = {}
    for key, (counted, device) in CASES.items():
        provider = get(counted.case.provider)
        launch = {name: figure for name, figure in (counted.launch or {}).items() if name not in schedule}
        changed = replace(counted, launch=launch), device, (provider.algorithm, replace(provider.schedule, **schedule))
        error = compare(*changed).read_error
        if error is not None:
            found[key] = error
    return found


def summary(found: dict[str, float], own: Callable[[str], bool]) -> str:
    shares = [share for key, share in found.items() if own(key)]
    off = sum(abs(share) > OFF for share in shares)
    return f"{off} of {len(shares)} off by more than 5 %, rms {100 * math.sqrt(sum(s * s for s in shares) / len(shares)):.1f} %"


def main() -> None:
    variants = {
        "as it is": errors(),
        "all walks up": errors(walks_down=False),
    }
    with mock.patch.object(tiled, "L2", LeastRecentlyUsed):
        variants["least recently used"] = errors()
    with mock.patch.object(l2, "LAG", 0.0):
        variants["all SMs alike"] = errors()
    with mock.patch.object(l2, "WAVES", 12):
        variants["12 waves"] = errors()
    with mock.patch.object(tiled, "L2", LeastRecentlyUsed), mock.patch.multiple(l2, LAG=0.0, WAVES=12):
        variants["none of these"] = errors(walks_down=False)
    for name, found in variants.items():
        own = summary(found, lambda key: key.startswith("flash-"))
        others = summary(found, lambda key: key.startswith("sdpa-"))
        print(f"{name:20} own kernels: {own};  PyTorch's: {others}")


if __name__ == "__main__":
    main()
