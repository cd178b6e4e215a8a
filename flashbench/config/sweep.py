"""The blocks that say which cases: axes of problems, what to include beside them and what to exclude."""

from __future__ import annotations

from pydantic import model_validator

from flashbench.config.fields import (
    Block,
    DtypeName,
    Heads,
    Length,
    LengthPair,
    Many,
    MaskName,
    ModeName,
    Provider,
    refuse,
)


class Axes(Block):
    """The axes of a sweep: its problems are the product of all lists."""

    mode: Many[ModeName] = ("forward",)
    dtype: Many[DtypeName]
    seq_len: Many[LengthPair] = ()
    """Query and KV length. `128/256` sets them apart, so a list of pairs runs along both at once (a zip).

    In decode a single length is the number of keys; there is one query.
    """
    seq_q: Many[Length] = ()
    seq_kv: Many[Length] = ()
    """With seq_q: the product of both lists."""
    head_dim: Many[LengthPair]
    """`192/128` for head_dim of queries and keys / of values."""
    mask: Many[MaskName] = ("none",)
    batch: Many[Length] = ()
    tokens: Many[Length] = ()
    """Instead of batch: batch = tokens // sequence length (the longer of query and KV), at least 1."""
    heads: Many[Heads] = ()
    """`32/8` for query/KV heads."""
    hidden: Many[Length] = ()
    """Instead of heads: heads = hidden / head_dim."""
    page_size: Many[Length] = ()
    """Keys to a page of a paged KV cache; not paged when not given."""

    @model_validator(mode="before")
    @classmethod
    def _one_sequence_per_batch(cls, data: object) -> object:
        return data | {"batch": 1} if isinstance(data, dict) and not {"batch", "tokens"} & data.keys() else data

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Axes:
        if self.batch and self.tokens:
            raise refuse("gives the batch a second time, beside 'batch'; keep one of them", "tokens")
        if self.heads and self.hidden:
            raise refuse("gives the heads a second time, beside 'heads'; keep one of them", "hidden")
        if self.seq_len and (self.seq_q or self.seq_kv):
            raise refuse("gives the length a second time, beside 'seq_len'", "seq_q" if self.seq_q else "seq_kv")
        if bool(self.seq_q) != bool(self.seq_kv):
            given, other = ("seq_q", "seq_kv") if self.seq_q else ("seq_kv", "seq_q")
            raise refuse(f"needs '{other}' beside it; or give 'seq_len' for both", given)
        if not (self.seq_len or self.seq_q):
            raise refuse("gives no sequence length: add 'seq_len', or 'seq_q' and 'seq_kv'")
        if not (self.heads or self.hidden):
            raise refuse("gives no heads: add 'heads', or 'hidden' for heads = hidden / head_dim")
        for hidden in self.hidden:
            for dim in self.head_dim:
                if hidden % dim.first:
                    raise refuse(f"{hidden} is not a multiple of head_dim {dim.first}; give 'heads' instead", "hidden")
        return self


class Inclusion(Axes):
    """Further problems: a block of axes of its own, for some providers or for all."""

    providers: Many[Provider] = ()


class Exclusion(Block):
    """Cases to leave out of the product of `problems`: those that match every key given here."""

    provider: Many[Provider] = ()
    mode: Many[ModeName] = ()
    dtype: Many[DtypeName] = ()
    seq_len: Many[LengthPair] = ()
    seq_q: Many[Length] = ()
    seq_kv: Many[Length] = ()
    head_dim: Many[LengthPair] = ()
    head_dim_v: Many[Length] = ()
    mask: Many[MaskName] = ()
    batch: Many[Length] = ()
    heads: Many[Heads] = ()
    heads_q: Many[Length] = ()
    heads_kv: Many[Length] = ()
    page_size: Many[Length] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Exclusion:
        if not self.model_fields_set:
            raise refuse("names nothing, and would exclude every case")
        return self
