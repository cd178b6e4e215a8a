"""How providers and dtypes look in every picture: a fixed colour and dashes for each provider, a fixed marker for each dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Dash = tuple[int, tuple[float, ...]]
_SOLID: Dash = (0, ())
_DOTS: Dash = (0, (1.2, 1.6))
_DASH_DOT: Dash = (0, (5, 1.6, 1.2, 1.6))
_LONG: Dash = (0, (9, 2.2))
_DASH_DOT_DOT: Dash = (0, (5, 1.6, 1.2, 1.6, 1.2, 1.6))
_DASHES = (_SOLID, _DASH_DOT, _DOTS, _LONG, _DASH_DOT_DOT)


@dataclass(frozen=True, slots=True)
class Look:
    """How a provider's line is drawn: the colour for the screen, the dashes for a greyscale print."""

    colour: str
    dashes: Dash


# Okabe and Ito's palette (2008) without its yellow, then Tol's "muted" scheme: both stay apart under the common colour-vision deficiencies.
# A provider keeps its look in every picture, so that two pictures compare.
PROVIDER_LOOKS = {
    "naive": Look("#D55E00", _DASH_DOT),
    "sdpa": Look("#000000", _DOTS),
    "sdpa-math": Look("#CC79A7", _DOTS),
    "sdpa-flash": Look("#0072B2", _SOLID),
    "sdpa-efficient": Look("#E69F00", _DASH_DOT_DOT),
    "sdpa-cudnn": Look("#009E73", _LONG),
    "tiled": Look("#999933", _DASH_DOT_DOT),
    "flash-v1": Look("#332288", _DASH_DOT),
    "flash-v2": Look("#56B4E9", _DASH_DOT),
    "flash-v2-one-pass": Look("#56B4E9", _DOTS),
    "flash-v3": Look("#882255", _SOLID),
    "flash-decode": Look("#44AA99", _LONG),
    "flex": Look("#999933", _DASH_DOT),
    "fa2": Look("#0072B2", _DOTS),
    "fa3": Look("#661100", _DOTS),
    "fa4": Look("#AA4499", _DASH_DOT_DOT),
    "gemm-qk": Look("#117733", _DOTS),
    "gemm-pv": Look("#117733", _LONG),
}
_OTHER_COLOURS = ("#117733", "#AA4499", "#44AA99", "#661100", "#CC6677", "#6699CC", "#000000")

DTYPE_MARKERS = {"bf16": "o", "fp16": "s", "fp32": "^", "tf32": "D", "fp8": "v"}
_MARKER_GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}


def provider_looks(providers: Iterable[str]) -> dict[str, Look]:
    """One look per provider, in order of name; names the project does not know take the next free ones.

    A provider on another device (`sdpa-flash @ a100`) has the provider's colour and dashes of its own.
    """
    names = sorted(set(providers))
    looks = {name: PROVIDER_LOOKS[name] for name in names if name in PROVIDER_LOOKS}
    free = (Look(colour, dashes) for dashes in _DASHES for colour in _OTHER_COLOURS)
    for name in names:
        base, at, _ = name.partition(" @ ")
        known = looks.get(base) or PROVIDER_LOOKS.get(base)
        if at and known:
            others = (Look(known.colour, dashes) for dashes in _DASHES if dashes != known.dashes)
            looks[name] = next((look for look in others if look not in looks.values()), known)
        elif name not in looks:
            looks[name] = next(look for look in free if look not in looks.values())
    return {name: looks[name] for name in names}


def marker_key(dtypes: Iterable[str]) -> str:
    """The markers in words, such as `● bf16  ■ fp16`."""
    return "  ".join(
        f"{_MARKER_GLYPHS[DTYPE_MARKERS[dtype]]} {dtype}" for dtype in DTYPE_MARKERS if dtype in set(dtypes)
    )
