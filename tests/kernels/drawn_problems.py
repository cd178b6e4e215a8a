"""Attention problems and block shapes for hypothesis to draw."""

from __future__ import annotations

from hypothesis import strategies as st
from problems import LAYOUTS, attention

from flashbench.kernels.blocks import BlockShape

layouts = st.sampled_from(LAYOUTS)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 90).map("window:{}".format))
blocks = st.builds(
    lambda block_q, block_kv, words: BlockShape(block_q, block_kv, 4, 1, *words),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([(False, False), (True, False), (True, True)]),
)


def problems(dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32"), longest: int = 80) -> st.SearchStrategy:
    """Problems of up to 2 sequences, 6 heads, `longest` positions and 70 channels, in any layout."""
    lengths = st.integers(1, longest)
    return st.builds(
        lambda group, heads_kv, seq, dim, **rest: attention(
            "drawn", f"{group * heads_kv}/{heads_kv}", seq, dim, **rest
        ),
        group=st.integers(1, 3),
        heads_kv=st.integers(1, 2),
        seq=st.builds("{}/{}".format, lengths, lengths),
        dim=st.builds("{}/{}".format, st.integers(1, 70), st.integers(1, 70)),
        batch=st.integers(1, 2),
        dtype=st.sampled_from(dtypes),
        mask=masks,
        layouts=st.tuples(layouts, layouts, layouts),
        scale=st.one_of(st.none(), st.floats(-1, 1)),
    )
