"""PyTorch's scaled_dot_product_attention: its own choice, and each backend alone.

`is_causal` of PyTorch is aligned top-left; a causal problem here is aligned bottom-right. The two agree when seq_q equals
seq_kv; elsewhere the adapter passes a lower-right bias, or says that the backend cannot do it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from flashbench.model.schedule import Schedule
from flashbench.model.tensors import seeing_queries
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


def _shared_reason(problem: Problem, device: Device) -> str | None:
    reason = no_kernel_for_dtype(problem, device)
    if reason is None and seeing_queries(problem) < problem.seq_q:
        reason = "some queries see no key, for which PyTorch's backends disagree (NaN, 0 or a mean)"
    return reason


def _absent(backend: str, device: Device) -> str | None:
    if backend in device.sdpa_backends:
        return None
    have = ", ".join(device.sdpa_backends) or "none"
    return f"this PyTorch has no {backend} backend for {device.name} (it has: {have})"


def _half_precision(problem: Problem, backend: str) -> str | None:
    if problem.dtype in ("bf16", "fp16"):
        return None
    return f"the {backend} backend takes bf16 and fp16, not {problem.dtype}"


def _odd_head_dim(problem: Problem, multiple: int, most: int | None, backend: str) -> str | None:
    widest = max(problem.head_dim, problem.head_dim_v)
    if most is not None and widest > most:
        return f"the {backend} backend takes head_dim up to {most}, not {widest}"
    for width in (problem.head_dim, problem.head_dim_v):
        if width % multiple:
            return f"the {backend} backend takes head_dim in multiples of {multiple}, not {width}"
    return None


def _auto(problem: Problem, device: Device) -> str | None:
    return _shared_reason(problem, device)


def _math(problem: Problem, device: Device) -> str | None:
    return _shared_reason(problem, device) or _absent("math", device)


def _flash(problem: Problem, device: Device) -> str | None:
    reason = _shared_reason(problem, device) or _absent("flash", device)
    if reason:
        return reason
    if problem.head_dim != problem.head_dim_v:
        return "the flash backend needs head_dim_v equal to head_dim"
    if device.kind == "cpu":
        return None
    if problem.window is not None:
        return "the flash backend takes no explicit mask, which a window needs in PyTorch"
    return _half_precision(problem, "flash") or _odd_head_dim(problem, 8, 256, "flash")


def _efficient(problem: Problem, device: Device) -> str | None:
    reason = _shared_reason(problem, device) or _absent("efficient", device)
    if reason:
        return reason
    if problem.heads_q != problem.heads_kv:
        return "the efficient backend has no grouped-query attention"
    return _odd_head_dim(problem, 8 if problem.element_bytes == 2 else 4, None, "efficient")


def _cudnn(problem: Problem, device: Device) -> str | None:
    reason = _shared_reason(problem, device) or _absent("cudnn", device)
    if reason:
        return reason
    if problem.mask == "causal" and 1 < problem.seq_q != problem.seq_kv:
        return "PyTorch hands cuDNN a causal mask only when seq_q equals seq_kv"
    return _half_precision(problem, "cudnn") or _odd_head_dim(problem, 8, 256, "cudnn")


PROVIDERS = (
    Provider("sdpa", "sdpa", "tiled-v2", "PyTorch's SDPA, its own choice of backend", _auto, "flashbench.providers.sdpa:bind_auto"),
    Provider(
        "sdpa-math", "sdpa", "materialised", "PyTorch's SDPA, math backend (materialises)", _math,
        "flashbench.providers.sdpa:bind_math", Schedule(passes=("mask_add", "grad_product", "safe_softmax", "returned_weights"), scaled_copies=("q", "k"), score_bytes=4),
    ),
    Provider(
        "sdpa-flash", "sdpa", "tiled-v2", "PyTorch's SDPA, FlashAttention-2 backend", _flash,
        "flashbench.providers.sdpa:bind_flash", Schedule(blocks_per_sm=2, walks_down=True, backward_copies=("o", "d_o")),
    ),
    Provider(
        "sdpa-efficient", "sdpa", "tiled-v2", "PyTorch's SDPA, memory-efficient (CUTLASS) backend", _efficient,
        "flashbench.providers.sdpa:bind_efficient", Schedule(block_q=64, blocks_per_sm=2, backward_copies=("d_o",)),
    ),
    Provider(
        "sdpa-cudnn", "sdpa", "tiled-v2", "PyTorch's SDPA, cuDNN backend", _cudnn,
        "flashbench.providers.sdpa:bind_cudnn",
    ),
)  # fmt: skip


def bind_auto(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, None)


def bind_math(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "MATH")


def bind_flash(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "FLASH_ATTENTION")


def bind_efficient(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "EFFICIENT_ATTENTION")


def bind_cudnn(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "CUDNN_ATTENTION")


def _bind(problem: Problem, device: Device, backend_name: str | None) -> Bound:
    """SDPA with one backend enabled for the length of each call (None: all of them)."""
    import contextlib

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from flashbench.providers.masking import hidden_keys

    options: dict[str, Any] = {}
    if problem.heads_q != problem.heads_kv:
        options["enable_gqa"] = True
    if problem.window is not None:
        hidden = hidden_keys(problem, torch.device(device.kind, device.index))
        if hidden is not None:
            options["attn_mask"] = ~hidden
    elif problem.mask == "causal" and problem.seq_q == problem.seq_kv:
        options["is_causal"] = True
    elif problem.mask == "causal" and problem.seq_q > 1:
        # Imported here alone: it brings the compiler with it, which takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        options["attn_mask"] = causal_lower_right(problem.seq_q, problem.seq_kv)
    # One query against a cache sees every key; is_causal would show it the first key only.

    backend = getattr(SDPBackend, backend_name) if backend_name else None

    def only() -> Any:
        return sdpa_kernel(backend) if backend is not None else contextlib.nullcontext()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with only():
            out: Tensor = scaled_dot_product_attention(q, k, v, **options)
            return out

    def choice(q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Which backend runs. A first call under it turns 'No available kernel' into the library's own reasons."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call(q, k, v)
            except RuntimeError as error:
                if "o available kernel" in str(error) or "o viable backend" in str(error):
                    raise Unsupported(_reasons(caught, str(error))) from None
                raise
        if backend_name is not None:
            return backend_name.removesuffix("_ATTENTION").lower()
        mask = options.get("attn_mask")
        if (
            mask is not None and type(mask) is not torch.Tensor
        ):  # a bias, which dispatches by itself and does not say where to
            return None
        chosen = torch._fused_sdp_choice(
            q, k, v, mask, 0.0, options.get("is_causal", False), enable_gqa="enable_gqa" in options
        )
        return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower() if chosen >= 0 else None

    return Bound(call, backend=choice)


def _reasons(caught: list[warnings.WarningMessage], error: str) -> str:
    """The reasons that PyTorch only warns about, each once, in place of its generic error."""
    texts = [str(w.message).split(" (Triggered")[0].strip() for w in caught]
    useful = [t for t in dict.fromkeys(texts) if not t.endswith("because:") and "not used because" not in t]
    return "; ".join(useful[:4]) or error.splitlines()[0]
