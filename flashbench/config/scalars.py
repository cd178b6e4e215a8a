"""How one value of a configuration is written: lengths, pairs, fractions, names.

Every function takes what YAML or the command line gave and returns the value, or raises ValueError with the rest of a sentence whose
subject is the text as written: `'2**12'` + ` is not a positive whole number; ...`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from flashbench.errors import UsageError, nearest
from flashbench.records import DTYPES, MASK_NAMES, MODES, parse_mask

K = 1024
"""`4k` is 4,096: lengths in this field are powers of two."""

_LENGTH = re.compile(r"([1-9][0-9]{0,11})(k?)")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?%")
_DECIMAL = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?|(GPU|MIG)-[0-9A-Za-z/-]+")


class Pair(NamedTuple):
    """Two sizes that are usually equal: query/KV heads, query/KV length, head_dim/head_dim_v. Written `8`, or `32/8`."""

    first: int
    second: int

    def plain(self) -> int | str:
        """As a configuration writes it."""
        return self.first if self.first == self.second else f"{self.first}/{self.second}"


def length(value: object) -> int:
    """A positive whole number, `512`, or with k = 1,024: `4k` is 4096."""
    if isinstance(value, bool):
        raise ValueError("is a truth value where a whole number is meant")
    if isinstance(value, int) and value > 0:
        return value
    if isinstance(value, (int, float)):
        raise ValueError("is not a positive whole number, such as 512 or 4k")
    if isinstance(value, str) and (match := _LENGTH.fullmatch(value)):
        return int(match[1]) * (K if match[2] else 1)
    raise ValueError(
        "is not a positive whole number; write it as 4096 or 4k (k = 1024), without separators or arithmetic"
    )


def pair(value: object) -> Pair:
    """`64` as (64, 64), and `192/128` as (192, 128)."""
    if isinstance(value, str) and value.count("/") == 1:
        first, second = value.split("/")
        return Pair(length(first.strip()), length(second.strip()))
    single = length(value)
    return Pair(single, single)


def heads(value: object) -> Pair:
    """Query and key/value heads; every key/value head serves the same number of query heads (Ainslie et al. 2023, section 2.2)."""
    count = pair(value)
    if count.first % count.second:
        raise ValueError(
            f"does not work: {count.first} query heads do not share {count.second} key/value heads evenly; "
            "the first must be a multiple of the second"
        )
    return count


def fraction(value: object) -> float:
    """`2%`, or `0.02`. A bare number of 1 or more could mean either and is refused."""
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        return float(match[1]) / 100
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, bool):
        raise ValueError("is a truth value where a fraction is meant, such as 2% or 0.02")
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError("is not a fraction; write it as 2% or 0.02")
    if value >= 1:
        raise ValueError(f"could be a percentage or a factor; write {value:g}% or {value / 100:g}")
    return float(value)


def number(value: object) -> float:
    """A finite number, 0 or more."""
    if isinstance(value, bool):
        raise ValueError("is a truth value where a number is meant")
    if isinstance(value, str):
        raise ValueError("is text where a number is meant")
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError("is not a finite number of 0 or more")
    return float(value)


def positive(value: object) -> float:
    """A finite number above 0."""
    if (result := number(value)) > 0:
        return result
    raise ValueError("must be more than 0")


def count(value: object) -> int:
    """A whole number, 0 or more."""
    if number(value) != value or isinstance(value, float):
        raise ValueError("is not a whole number")
    return int(number(value))


def truth(value: object) -> bool:
    """`true` or `false`, and nothing that YAML 1.1 took for them."""
    if isinstance(value, bool):
        return value
    raise ValueError("is not a truth value; write true or false")


def text(value: object) -> str:
    """Text that is not empty. A number or a truth value was probably meant as something else."""
    if isinstance(value, bool):
        raise ValueError("is a truth value where a name is meant; put it in quotes if it is the name")
    if isinstance(value, (int, float)):
        raise ValueError("is a number where a name is meant; put it in quotes if it is the name")
    if not isinstance(value, str) or not value.strip():
        raise ValueError("is not a name")
    return value


def one_of(value: object, known: Sequence[str], what: str) -> str:
    """One of the `known` words for a `what`."""
    word = text(value)
    if word not in known:
        raise ValueError(f"is not a {what}{nearest(word, known)} (known: {', '.join(known)})")
    return word


def dtype(value: object) -> str:
    return one_of(value, DTYPES, "dtype")


def mode(value: object) -> str:
    return one_of(value, MODES, "mode")


def mask(value: object) -> str:
    """`none`, `causal`, or `window:W`: the last W keys, itself included, W at least 1."""
    word = text(value)
    try:
        return parse_mask(word)
    except UsageError:
        if word.startswith("window"):
            raise ValueError(
                "is not a mask: a window shows the last W keys, W a positive whole number, as in window:1024; "
                "write 'none' for no window"
            ) from None
        hint = nearest(word, ("none", "causal"))
        raise ValueError(f"is not a mask{hint} (known: {', '.join(MASK_NAMES)})") from None


def provider(value: object) -> str:
    """The name of a provider or `file.py:function`. It begins a case's key, which is split at spaces."""
    name = text(value)
    if re.search(r"\s", name):
        raise ValueError("is not the name of a provider: it holds a space")
    return name


def device(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"is a number where a device is meant; write cuda:{value}")
    word = text(value)
    if not _DEVICE.fullmatch(word):
        raise ValueError(
            "is not a device (known: auto, cpu, cuda, cuda:1, or a GPU's UUID as `nvidia-smi -L` prints it)"
        )
    return word


def run_name(value: object) -> str:
    """A name that can be part of a folder's name."""
    word = text(value)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", word):
        raise ValueError(
            "cannot name a folder of results; use up to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return word
