"""Every provider of the table: right on what it says it supports, and a reason in words for the rest."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashbench.errors import UsageError, nearest
from flashbench.measure.check import check_results
from flashbench.measure.device import describe
from flashbench.measure.reference import make_reference
from flashbench.measure.workload import make_inputs, make_operation
from flashbench.model.masks import visible_range
from flashbench.model.schedule import PASSES
from flashbench.providers import sdpa
from flashbench.providers.masking import hidden_keys
from flashbench.providers.spec import Unsupported
from flashbench.providers.table import PROVIDERS, get
from flashbench.records import Device, Problem

CPU = describe("cpu")
H200 = Device(
    "cuda",
    "NVIDIA H200",
    150_000_000_000,
    capability=(9, 0),
    sdpa_backends=("math", "flash", "efficient", "cudnn"),
    versions={"triton": "3.6.0"},
)
T4 = Device(
    "cuda",
    "Tesla T4",
    16_000_000_000,
    capability=(7, 5),
    sdpa_backends=("math", "efficient"),
    versions={"triton": "3.6.0"},
)
NOT_ON_CPU = ("flash-v1", "flash-v2", "flash-v2-one-pass", "flash-decode", "fa3", "sdpa-efficient", "sdpa-cudnn")
ON_CPU = [
    name
    for name, provider in PROVIDERS.items()
    if provider.computes == "attention" and name not in NOT_ON_CPU and not name.startswith("flash-v3")
]

SHAPES = {
    "square": {},
    "odd lengths": {"seq_q": 33, "seq_kv": 47},
    "more queries than keys": {"seq_q": 47, "seq_kv": 33},
    "one query": {"seq_q": 1, "seq_kv": 20},
    "grouped heads": {"heads_q": 4, "heads_kv": 2},
    "other value width": {"head_dim_v": 8},
}


def problem(**changes: object) -> Problem:
    sizes = {
        "batch": 2,
        "heads_q": 2,
        "heads_kv": 2,
        "seq_q": 40,
        "seq_kv": 40,
        "head_dim": 16,
        "head_dim_v": 16,
        "dtype": "fp32",
    }
    return Problem(**{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["forward", "backward", "forward_backward"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:5"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ON_CPU)
def test_a_supported_problem_gives_the_right_output_and_gradients(name: str, shape: str, mask: str, mode: str) -> None:
    asked = problem(mask=mask, mode=mode, **SHAPES[shape])
    provider = get(name)
    if provider.unsupported(asked, CPU):
        assert len(provider.unsupported(asked, CPU) or "") > 10
        return
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    operation = make_operation(asked, provider.bind(asked, CPU), inputs)
    outcome = check_results(asked, make_reference(asked, inputs, CPU), operation.results())
    assert outcome.problem is None


@pytest.mark.parametrize("name", ["naive", "tiled"])
@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "seen"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2]), (1, 8, [8]), (3, 3, [1, 2, 3])]
)
def test_causal_is_aligned_bottom_right(name: str, seq_q: int, seq_kv: int, seen: list[int]) -> None:
    # KF-10, DE-02: equal scores make the output the mean of the visible one-hot values, which shows the mask.
    asked = problem(batch=1, heads_q=1, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, head_dim_v=seq_kv, mask="causal")
    q, k = torch.zeros(1, 1, seq_q, 16), torch.randn(1, 1, seq_kv, 16)
    out = get(name).bind(asked, CPU).call(q, k, torch.eye(seq_kv)[None, None])
    assert (out[0, 0] > 0).sum(-1).tolist() == seen


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "sdpa-flash"])
def test_sdpa_sees_the_whole_cache_with_one_query(name: str) -> None:
    # DE-02: is_causal with one query would attend to the first key only.
    asked = problem(batch=1, heads_q=1, heads_kv=1, seq_q=1, seq_kv=8, head_dim_v=8, head_dim=8, mask="causal")
    bound = get(name).bind(asked, CPU)
    out = bound.call(torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 8, 8), torch.eye(8)[None, None])
    assert torch.allclose(out, torch.full_like(out, 1 / 8))


@pytest.mark.parametrize("name", ON_CPU)
def test_a_group_of_query_heads_shares_its_neighbouring_key_value_head(name: str) -> None:
    # DE-06: heads 0,0,1,1, not 0,1,0,1.
    asked = problem(batch=1, heads_q=4, heads_kv=2)
    q, k = torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16)
    v = torch.arange(2.0).view(1, 2, 1, 1).repeat(1, 1, 40, 16)
    out = get(name).bind(asked, CPU).call(q, k, v)
    assert out.mean((0, 2, 3)).round().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("mask", ["causal", "window:1", "window:4", "window:100"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(8, 8), (3, 8), (8, 3), (1, 1)])
def test_the_boolean_mask_is_the_mask_of_the_model(mask: str, seq_q: int, seq_kv: int) -> None:
    hidden = hidden_keys(problem(mask=mask, seq_q=seq_q, seq_kv=seq_kv), torch.device("cpu"))
    for i in range(seq_q):
        first, end = visible_range(mask, seq_q, seq_kv, i)
        seen = [j for j in range(seq_kv) if hidden is None or not hidden[i, j]]
        assert seen == list(range(first, end))


@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_a_query_that_sees_no_key_gives_0_and_finite_gradients(name: str) -> None:
    # SD-06: elsewhere such rows give NaN, 0 or a mean, depending on version, backend and device. SDPA's own are refused with that reason.
    asked = problem(seq_q=8, seq_kv=4, mask="causal", mode="backward")
    inputs = make_inputs(asked, 0, torch.device("cpu"))
    results = make_operation(asked, get(name).bind(asked, CPU), inputs).results()
    assert bool((results["out"][:, :, :4] == 0).all())
    assert bool((results["dq"][:, :, :4] == 0).all())
    assert all(bool(torch.isfinite(value).all()) for value in results.values())
    assert "see no key" in (get("sdpa-math").unsupported(asked, CPU) or "")


def test_a_token_sees_its_window_and_itself() -> None:
    # KF-18: windows off by one, inclusive bounds.
    asked = problem(batch=1, heads_q=1, heads_kv=1, seq_q=8, seq_kv=8, head_dim_v=8, mask="window:4")
    for name in ("naive", "tiled", "sdpa-math"):
        out = (
            get(name)
            .bind(asked, CPU)
            .call(torch.zeros(1, 1, 8, 16), torch.randn(1, 1, 8, 16), torch.eye(8)[None, None])
        )
        assert out[0, 0, 7].nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_each_sdpa_provider_enables_one_backend_and_puts_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # SD-05: a list of backends is a set of permissions; the state must come back after an exception too.
    seen = []

    def spy(*_: object, **__: object) -> torch.Tensor:
        seen.append(
            (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
             torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())
        )  # fmt: skip
        raise RuntimeError("stop here")

    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    q = torch.zeros(1, 1, 4, 8)
    for bind in (sdpa.bind_flash, sdpa.bind_efficient, sdpa.bind_math, sdpa.bind_cudnn):
        with pytest.raises(RuntimeError, match="stop here"):
            bind(problem(), CPU).call(q, q, q)
    assert seen == [
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ]
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


def test_a_missing_kernel_is_told_with_the_librarys_own_reasons_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # SD-03: PyTorch warns the reasons one by one and then raises a generic error.
    def no_kernel(*_: object, **__: object) -> torch.Tensor:
        for _ in range(2):
            warnings.warn(
                "Flash attention requires last dimension of inputs to equal 64. (Triggered internally at x.cpp:1)",
                stacklevel=1,
            )
            warnings.warn("Expected query to have rank 4. (Triggered internally at x.cpp:2)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", no_kernel)
    bound = sdpa.bind_flash(problem(), CPU)
    assert bound.backend is not None
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(Unsupported) as refused:
        bound.backend(q, q, q)
    assert (
        str(refused.value)
        == "Flash attention requires last dimension of inputs to equal 64.; Expected query to have rank 4."
    )


def test_the_row_can_say_which_backend_pytorch_chose() -> None:
    bound = get("sdpa").bind(problem(), CPU)
    assert bound.backend is not None
    q = torch.randn(2, 2, 40, 16)
    assert bound.backend(q, q, q) in ("flash", "math")


@pytest.mark.parametrize(
    ("name", "changes", "device", "words"),
    [
        # SD-04: refused before anything is allocated, with the reason.
        ("sdpa-efficient", {"head_dim": 20, "head_dim_v": 20, "dtype": "fp16"}, H200, "multiples of 8, not 20"),
        ("sdpa-efficient", {"head_dim": 1, "head_dim_v": 1, "dtype": "fp16"}, H200, "multiples of 8, not 1"),
        ("sdpa-efficient", {"heads_q": 4, "dtype": "bf16"}, H200, "no grouped-query"),
        ("sdpa-flash", {"dtype": "fp32"}, H200, "takes bf16 and fp16"),
        ("sdpa-flash", {"dtype": "bf16", "head_dim": 264, "head_dim_v": 264}, H200, "up to 256"),
        ("sdpa-flash", {"dtype": "bf16", "mask": "window:8"}, H200, "no explicit mask"),
        ("sdpa-flash", {"dtype": "bf16", "seq_q": 41, "mask": "causal"}, H200, "see no key"),
        ("sdpa-cudnn", {"dtype": "bf16", "seq_q": 20, "mask": "causal"}, H200, "seq_q equals seq_kv"),
        # SD-07: bf16 on a card without it fails deep in the stack.
        ("naive", {"dtype": "bf16"}, T4, "bf16 needs sm_80"),
        ("sdpa-math", {"dtype": "bf16"}, T4, "bf16 needs sm_80"),
        ("flash-v2", {"dtype": "fp16"}, T4, "sm_80 or newer"),
        ("flash-v2", {}, CPU, "TRITON_INTERPRET=1"),
        ("flash-v2", {"dtype": "bf16", "mode": "backward", "head_dim": 8}, H200, "from 16 to 256, not 8"),
        ("flash-v2-one-pass", {"dtype": "bf16"}, H200, "in its backward pass only"),
        ("naive", {"dtype": "fp8"}, H200, "fp8 is not supported"),
        ("naive", {"dtype": "tf32"}, CPU, "GPUs only"),
        ("tiled", {"page_size": 16}, CPU, "paged"),
        ("sdpa-cudnn", {}, CPU, "no cudnn backend"),
    ],
)  # fmt: skip
def test_what_cannot_run_has_a_reason(name: str, changes: dict[str, object], device: Device, words: str) -> None:
    reason = get(name).unsupported(problem(**changes), device)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("name", ["naive", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flash-v2"])
def test_the_usual_problem_runs_on_a_hopper_card(name: str) -> None:
    usual = problem(
        dtype="bf16", heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=128, head_dim_v=128, mask="causal"
    )
    assert get(name).unsupported(usual, H200) is None


def test_an_unknown_provider_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'sdpa-flash'"):
        get("sdpa-flsh")


def test_backends_are_named_as_pytorch_names_them() -> None:
    # A renamed enum would make every sdpa provider look absent.
    assert {"MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"} <= set(SDPBackend.__members__)


def test_the_schedule_of_naive_counts_what_autograd_copies_when_it_goes_back_through_the_mask() -> None:
    from torch.profiler import ProfilerActivity, profile

    p = Problem(1, 2, 2, 64, 64, 32, 32, "fp32", mask="causal", mode="backward")
    operation = make_operation(p, get("naive").bind(p, CPU), make_inputs(p, 0, torch.device("cpu")))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        operation.run()
    over_scores = [
        event.name for event in trace.events() if event.input_shapes and math.prod(event.input_shapes[0]) == 2 * 64 * 64
    ]
    copies, zeros, fills = (over_scores.count(f"aten::{name}") for name in ("copy_", "zero_", "masked_fill_"))
    assert {"mask_fill", "view_copies"} <= set(get("naive").schedule.passes)
    assert (copies, copies + zeros) == PASSES["view_copies"].backward
    assert (fills, fills) == PASSES["mask_fill"].backward


def test_of_equally_close_names_the_first_of_the_table_is_the_hint() -> None:
    assert nearest("flsh", PROVIDERS) == "; did you mean 'flash-v2'?"
    assert nearest("nothing like it", ("flash-v2",)) == ""
    assert nearest("flash", ()) == ""
