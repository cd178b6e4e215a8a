"""What flash-v3, its variants and FlashAttention-3 itself say before anything runs: the reasons, and what to install."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from flashbench.errors import UsageError
from flashbench.measure.workload import make_inputs
from flashbench.model.tensors import tensors
from flashbench.model.traffic import traffic
from flashbench.providers import fa3, flash_v3
from flashbench.providers.spec import Unsupported
from flashbench.providers.table import PROVIDERS, get
from flashbench.records import Device, Problem

H200 = Device("cuda", "NVIDIA H200", 150_000_000_000, capability=(9, 0), versions={"triton": "3.6.0"})
B200 = dataclasses.replace(H200, name="NVIDIA B200", capability=(10, 0))
CPU = Device("cpu", "a processor", 16_000_000_000, versions={"triton": "3.6.0"})
USUAL = Problem(4, 16, 16, 4096, 4096, 128, 128, "bf16", mask="causal")
VARIANTS = [name for name in PROVIDERS if name.startswith("flash-v3")]


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if not name.endswith(("two-consumers", "deterministic", "stored-v"))]
)
@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_hopper_card_runs_it_and_its_variants(name: str, mask: str, head_dim: int) -> None:
    asked = dataclasses.replace(USUAL, mask=mask, head_dim=head_dim, head_dim_v=head_dim, heads_kv=4, seq_q=33)
    assert get(name).unsupported(asked, H200) is None


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, B200, "for Hopper, sm_90; this GPU is sm_100"),
        ({}, CPU, "Gluon has no interpreter"),
        ({}, dataclasses.replace(H200, triton_interpreter=True), "no TRITON_INTERPRET"),
        ({}, dataclasses.replace(H200, versions={}), "Triton is not installed"),
        ({}, dataclasses.replace(H200, versions={"triton": "3.5.1"}), "needs Triton 3.6 or later, for Gluon; this is 3.5.1"),
        ({"dtype": "fp32"}, H200, "bf16, fp16 and fp8, not fp32"),
        ({"dtype": "fp8", "head_dim": 72}, H200, "multiples of 16 up to 256 as head_dim of fp8 queries and keys, not 72"),
        ({"dtype": "fp8", "head_dim_v": 100}, H200, "multiples of 8 up to 256 as head_dim, not 128/100"),
        ({"dtype": "fp8"}, B200, "for Hopper"),
        ({"mode": "backward", "head_dim": 192, "head_dim_v": 128}, H200, "registers for dK and dV up to head_dim 128, not 192/128"),
        ({"head_dim": 20}, H200, "multiples of 8 up to 256 as head_dim, not 20/128"),
        ({"page_size": 16}, H200, "paged"),
    ],
)  # fmt: skip
def test_what_flash_v3_cannot_run_has_a_reason(changes: dict, device: Device, words: str) -> None:
    assert words in (get("flash-v3").unsupported(dataclasses.replace(USUAL, **changes), device) or "")


@pytest.mark.parametrize("mode", ["backward", "forward_backward"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_hopper_card_runs_its_backward_pass_in_both_variants(head_dim: int, mask: str, mode: str) -> None:
    asked = dataclasses.replace(USUAL, mask=mask, head_dim=head_dim, head_dim_v=64, heads_kv=4, seq_q=33, mode=mode)
    assert get("flash-v3").unsupported(asked, H200) is None
    assert get("flash-v3:deterministic").unsupported(asked, H200) is None


@pytest.mark.parametrize("name", ["flash-v3", "flash-v3:stored-v"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:100"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 72), (256, 256)])
def test_a_hopper_card_runs_fp8_forward(name: str, mask: str, dims: tuple[int, int]) -> None:
    asked = dataclasses.replace(
        USUAL, dtype="fp8", mask=mask, head_dim=dims[0], head_dim_v=dims[1], heads_kv=4, seq_q=33
    )
    assert get(name).unsupported(asked, H200) is None


def test_a_variant_of_one_dtype_says_so_in_the_others() -> None:
    fp8 = dataclasses.replace(USUAL, dtype="fp8")
    assert "for bf16 and fp16, not fp8" in (get("flash-v3:no-pingpong").unsupported(fp8, H200) or "")
    assert "for bf16 and fp16, not fp8" in (get("flash-v3:deterministic").unsupported(fp8, H200) or "")
    assert "for fp8, not bf16" in (get("flash-v3:stored-v").unsupported(USUAL, H200) or "")


def test_a_stored_v_is_a_variant_whose_bytes_and_summary_leave_the_transposition_out() -> None:
    plain, stored = get("flash-v3"), get("flash-v3:stored-v")
    fp8 = dataclasses.replace(USUAL, dtype="fp8")
    moved = [traffic(provider.algorithm, fp8, schedule=provider.schedule).estimate for provider in (plain, stored)]
    assert moved[0] - moved[1] == 2 * tensors(fp8).v
    assert "not timed" in stored.summary


def test_the_kernel_takes_v_as_it_is_or_as_it_is_stored() -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    fp8 = dataclasses.replace(USUAL, dtype="fp8")
    plain, stored = (get(name).bind(fp8, CPU) for name in ("flash-v3", "flash-v3:stored-v"))
    assert plain.store is None
    assert stored.store is not None
    q = torch.zeros(1, 2, 96, 64).to(torch.float8_e4m3fn)
    with pytest.raises(UsageError, match="sm_90; this is no GPU"):
        stored.call(q, q, q.transpose(2, 3).contiguous(), torch.ones(1, 2, 3))
    with pytest.raises(UsageError, match="V with its keys last"):
        stored.call(q, q, q, torch.ones(1, 2, 3))


def test_a_variant_of_one_pass_says_so_in_the_modes_of_the_other() -> None:
    backward = dataclasses.replace(USUAL, mode="backward")
    assert "in its forward pass only" in (get("flash-v3:no-pingpong").unsupported(backward, H200) or "")
    assert "in its backward pass only" in (get("flash-v3:deterministic").unsupported(USUAL, H200) or "")


def test_a_variant_that_changes_nothing_is_not_measured_under_another_name() -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    get("flash-v3:named-release").bind(USUAL, CPU)
    with pytest.raises(Unsupported, match="flash-v3 is flash-v3:named-release by itself"):
        get("flash-v3:named-release").bind(dataclasses.replace(USUAL, head_dim=256, head_dim_v=256), CPU)


def test_newer_versions_of_triton_count_as_newer() -> None:
    assert flash_v3.triton_version(dataclasses.replace(H200, versions={"triton": "3.10.0+git1234"})) == (3, 10)


def test_two_consumers_are_a_variant_where_there_are_three() -> None:
    two = get("flash-v3:two-consumers")
    assert "two consumers itself" in (two.unsupported(USUAL, H200) or "")
    assert two.unsupported(dataclasses.replace(USUAL, head_dim=64, head_dim_v=64), H200) is None


def test_the_providers_name_the_variants_of_the_kernel() -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    from flashbench.kernels.flash_v3_designs import VARIANTS as KERNEL_VARIANTS
    from flashbench.kernels.flash_v3_gradients import MAX_HEAD_DIM
    from flashbench.kernels.flash_v3_gradients import VARIANTS as BACKWARD_VARIANTS

    assert set(flash_v3.SUMMARIES) == set(KERNEL_VARIANTS) - {""}
    assert set(flash_v3.BACKWARD_SUMMARIES) == set(BACKWARD_VARIANTS) - {""}
    assert flash_v3.MAX_BACKWARD_HEAD_DIM == MAX_HEAD_DIM


def test_the_kernel_refuses_what_the_provider_cannot_see() -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    bound = get("flash-v3").bind(USUAL, CPU)
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="sm_90; this is no GPU"):
        bound.call(q, q, q)
    with pytest.raises(UsageError, match="copy engine"):
        bound.call(q.transpose(2, 3), q, q)


def test_a_design_that_does_not_fit_the_chip_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    from flashbench.kernels import flash_v3_launches as v3
    from flashbench.kernels.inputs import DeviceLimits

    monkeypatch.setattr(v3, "device_limits", lambda _: DeviceLimits((9, 0), v3.SHARED_BYTES, 60 * 2**20))
    q = torch.zeros(1, 2, 64, 256, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="128x128 s2 at head_dim 256/256 do not fit"):
        v3.prepare(q, q, q, design=v3.Design())
    with pytest.raises(UsageError, match="did you mean 'no-pingpong'"):
        v3.prepare(q, q, q, variant="ping-pong")


def test_what_the_backward_pass_refuses_it_refuses_before_the_forward_pass_runs() -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon")
    from flashbench.kernels.flash_v3_gradients import flash_v3 as attend

    q = torch.zeros(1, 2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UsageError, match="up to 128"):
        attend(q, q, q)
    with pytest.raises(UsageError, match="did you mean 'deterministic'"):
        attend(q, q, q, backward="deterministik")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, flags: dict[str, bool], code: str) -> None:
    """A package of FlashAttention-3 as far as this project sees one: a module of flags beside a module with the function."""
    interface, config = next(pair for pair in fa3.MODULES if pair[0] == name)
    (folder / f"{config}.py").write_text(f"CONFIG = {{'build_flags': {flags!r}}}")
    (folder / f"{interface}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    for module in (interface, config):
        monkeypatch.delitem(sys.modules, module, raising=False)


BF16_ONLY = {
    "FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_FP8": True, "FLASHATTENTION_DISABLE_LOCAL": True,
    "FLASHATTENTION_DISABLE_BACKWARD": True,
}  # fmt: skip
FORWARD_ONLY = {"FLASHATTENTION_DISABLE_FP16": False, "FLASHATTENTION_DISABLE_BACKWARD": True}
ECHO = "def flash_attn_func(q, k, v, **options):\n    flash_attn_func.seen = (q.shape, options)\n    return v\n"


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "MODULES", (("fa3_that_is_not_there", "config_that_is_not_there"),))


@pytest.mark.usefixtures("none_installed")
def test_fa3_says_what_to_install() -> None:
    reason = get("fa3").unsupported(USUAL, H200)
    assert "fa3-fwd" in (reason or "")
    assert "tokenspeed-fa3" in (reason or "")
    with pytest.raises(Unsupported, match="pip install"):
        get("fa3").bind(USUAL, H200)


def test_fa3_says_what_a_build_lacks_and_runs_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "fa3_fwd_interface", BF16_ONLY, ECHO)
    monkeypatch.setattr(fa3, "MODULES", (("fa3_fwd_interface", "fa3_fwd_config"),))
    reasons = {
        words: get("fa3").unsupported(dataclasses.replace(USUAL, **changes), H200) or ""
        for words, changes in {
            "no fp16": {"dtype": "fp16"}, "no fp8": {"dtype": "fp8"}, "no sliding windows": {"mask": "window:8"}, "no backward pass": {"mode": "backward"}
        }.items()
    }  # fmt: skip
    assert all(f"fa3_fwd_interface has {words}" in reason for words, reason in reasons.items())
    assert get("fa3").unsupported(USUAL, H200) is None


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, B200, "for Hopper"),
        ({}, CPU, "for Hopper"),
        ({"dtype": "fp32"}, H200, "bf16, fp16 and fp8 here, not fp32"),
        ({"dtype": "fp8", "head_dim": 72, "head_dim_v": 72}, H200, "a multiple of 16 up to 256, not 72/72"),
        ({"head_dim_v": 64}, H200, "one head_dim for Q, K and V"),
        ({"page_size": 16}, H200, "paged"),
    ],
)
def test_what_fa3_cannot_run_has_a_reason(changes: dict, device: Device, words: str) -> None:
    assert words in (get("fa3").unsupported(dataclasses.replace(USUAL, **changes), device) or "")


def test_fa3_is_called_with_its_own_axes_and_a_window_of_as_many_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "flash_attn_interface", FORWARD_ONLY, ECHO)
    bound = get("fa3").bind(dataclasses.replace(USUAL, dtype="fp16", mask="window:8"), H200)
    q = torch.zeros(2, 16, 40, 128)
    assert bound.call(q, q, q).shape == q.shape
    shape, options = sys.modules["flash_attn_interface"].flash_attn_func.seen
    assert tuple(shape) == (2, 40, 16, 128)
    assert options == {"causal": True, "softmax_scale": 128**-0.5, "window_size": (7, 0)}
    assert bound.backend is not None
    assert bound.backend(q, q, q) == "flash_attn_interface"


def test_fa3_is_given_the_scale_of_each_head_and_v_along_its_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "flash_attn_interface", FORWARD_ONLY, ECHO)
    asked = dataclasses.replace(USUAL, batch=2, heads_q=4, heads_kv=2, seq_q=40, seq_kv=50, dtype="fp8")
    assert get("fa3").unsupported(asked, H200) is None
    q, k, v, descales = make_inputs(asked, 0, torch.device("cpu")).arguments
    out = get("fa3").bind(asked, H200).call(q, k, v, descales)
    assert out.data_ptr() == v.data_ptr()
    assert out.stride() == v.stride()
    shape, options = sys.modules["flash_attn_interface"].flash_attn_func.seen
    assert tuple(shape) == (2, 40, 4, 128)
    for which, name in enumerate(("q_descale", "k_descale", "v_descale")):
        assert torch.equal(options.pop(name), descales[:, :, which])
    assert options == {"causal": True, "softmax_scale": 128**-0.5}


def test_a_package_that_does_not_load_is_a_reason_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "flash_attn_interface", FORWARD_ONLY, "raise ImportError('libcudart.so.13')")
    with pytest.raises(Unsupported, match="cannot be loaded: libcudart"):
        get("fa3").bind(USUAL, H200)
