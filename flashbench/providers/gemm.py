"""The two matrix products of attention alone, through the vendor's library: S = QKᵀ and O = PV, each writing or reading all N x N scores.

They are no attention. They show on the roofline what a product with a short side can reach when its long side lives in HBM: QKᵀ alone
has an arithmetic intensity of 2N²d / (N²s + 2Nds), near d in half precision: up to d = 128 left of the ridge of an A100 and all since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashbench.providers.spec import Bound, Provider, no_product
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

PROVIDERS = (
    Provider(
        "gemm-qk", "gemm", "gemm-qk", "S = QKᵀ alone, by torch.matmul: one product, no attention", no_product,
        "flashbench.providers.gemm:bind_scores",
    ),
    Provider(
        "gemm-pv", "gemm", "gemm-pv", "O = PV alone, by torch.matmul: one product, no attention", no_product,
        "flashbench.providers.gemm:bind_values",
    ),
)  # fmt: skip


def bind_scores(problem: Problem, _device: Device) -> Bound:
    """S = QKᵀ, unscaled, in the dtype of the inputs. The query heads of a group are rows of one product, so that K is not copied."""

    def call(q: Tensor, k: Tensor) -> Tensor:
        grouped = q.reshape(problem.batch, problem.heads_kv, -1, problem.head_dim)
        return (grouped @ k.transpose(-1, -2)).view(*q.shape[:3], problem.seq_kv)

    return Bound(call)


def bind_values(problem: Problem, _device: Device) -> Bound:
    """O = PV of weights (batch, heads_q, seq_q, seq_kv) that were there before the call."""

    def call(weights: Tensor, v: Tensor) -> Tensor:
        grouped = weights.reshape(problem.batch, problem.heads_kv, -1, problem.seq_kv)
        return (grouped @ v).view(*weights.shape[:3], problem.head_dim_v)

    return Bound(call)
