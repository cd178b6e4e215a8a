"""Somebody's own kernel: a function in a Python file (`path/to/file.py:function`) or an entry point `flashbench.providers`.

The file is imported by the worker only. It is checked, isolated, measured and plotted like every other provider.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.errors import UsageError, nearest
from flashbench.model.flops import PRODUCTS
from flashbench.model.traffic import ALGORITHMS
from flashbench.providers.spec import Bound, Provider, Unsupported, no_mode_in_fp8, no_product
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINTS = "flashbench.providers"
DEFAULT_ALGORITHM = "tiled-v2"

TEMPLATE = '''\
"""A kernel of your own for flashbench:  flashbench sweep --provider this_file.py:attention"""

import torch

algorithm = "materialised"  # which byte model fits: materialised, tiled-v1, tiled-v2 (assumed when left out), decode


def attention(q, k, v, *, mask, window, scale):
    """q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (batch, heads_kv, seq_kv, head_dim_v).

    mask is "none", "causal" or "window". Both causal and window are aligned bottom-right: the last query sees the last key.
    With "window" a query sees the last `window` keys, its own included; otherwise window is None. Return
    (batch, heads_q, seq_q, head_dim_v) in the inputs' dtype. For `mode: backward` it must work under autograd
    (torch.autograd.Function for a backward kernel of your own).

    With dtype fp8 q, k and v are torch.float8_e4m3fn, and a fourth argument follows them: descales (batch, heads_kv, 3), fp32, what
    one unit of each stands for. Return bf16.
    """
    group = q.shape[1] // k.shape[1]
    scores = (q * scale) @ k.repeat_interleave(group, dim=1).transpose(-1, -2)
    if mask != "none":
        last = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        key = torch.arange(k.shape[2], device=q.device)[None, :]
        hidden = key > last
        if window is not None:
            hidden |= key <= last - window
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, dim=1)


def unsupported(problem, device):
    """Optional: a reason in words why a problem cannot run on a device, or None."""
    if problem.seq_q > problem.seq_kv and problem.mask != "none":
        return "queries that see no key"
    return None
'''


def is_file(name: str) -> bool:
    """Whether a provider's name is a file and a function in it."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def from_file(name: str) -> Provider:
    """The provider `path/to/file.py:function`; UsageError when there is no such file."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise UsageError(f"provider '{name}': there is no file '{path}'")
    return _provider(name, name, _declared_algorithm(path))


def _declared_algorithm(path: Path) -> str:
    """The text that the file assigns to `algorithm`, read without running it; UsageError when no byte model has that name."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return DEFAULT_ALGORITHM  # the worker, which imports the file, says what is wrong with it
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id="algorithm")], value=ast.Constant(value=str(name))):
                if name not in ALGORITHMS:
                    known = ", ".join(ALGORITHMS)
                    raise UsageError(f"{path}: unknown algorithm '{name}'{nearest(name, ALGORITHMS)} (known: {known})")
                return name
    return DEFAULT_ALGORITHM


def entry_points() -> dict[str, Provider]:
    """Providers that installed packages offer, by name."""
    return {
        point.name: _provider(point.name, point.value) for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }


def _no_inputs(problem: Problem, _device: Device) -> str | None:
    if problem.page_size is not None:
        return "a function of one's own is given contiguous K and V, no paged cache"
    return no_mode_in_fp8(problem)


def _provider(name: str, source: str, algorithm: str = DEFAULT_ALGORITHM) -> Provider:
    return Provider(
        name=name,
        family="user",
        algorithm=algorithm,
        summary=f"a kernel from {source}",
        unsupported=no_product if algorithm in PRODUCTS else _no_inputs,
        loader="flashbench.providers.user:bind",
        source=source,
    )


def bind(problem: Problem, device: Device, source: str) -> Bound:
    """Import the function that `source` names and adapt it to the common call."""
    module, function = _load(source)
    reason = getattr(module, "unsupported", lambda _problem, _device: None)(problem, device)
    if reason:
        raise Unsupported(str(reason))
    arguments: dict[str, Any] = {
        "mask": "window" if problem.window is not None else problem.mask,
        "window": problem.window,
        "scale": problem.head_dim**-0.5,
    }

    def call(*tensors: Tensor) -> Tensor:
        out: Tensor = function(*tensors, **arguments)
        return out

    return Bound(call)


def _load(source: str) -> tuple[ModuleType, Callable[..., Any]]:
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"flashbench_user_{Path(place).stem}", place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        have = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise AttributeError(f"{place} has no function '{name}' (it has: {have})")
    function: Callable[..., Any] = getattr(module, name)
    return module, function
