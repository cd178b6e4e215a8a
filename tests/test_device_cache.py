"""A device is described once and remembered, until what decides comparisons has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import H200, Card, FakeNvml

from flashbench.records import Device, to_plain
from flashbench.run import devices

CARD = Device("cuda", "NVIDIA H200", 1 << 37, index=0, uuid="GPU-1", power_limit_w=700.0, mig=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the worker was asked for; it answers with a card of 500 W."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted: list[str] = []

    def answer(name: str) -> Device:
        wanted.append(name)
        return replace(CARD, power_limit_w=500.0)

    monkeypatch.setattr(devices, "ask_device", answer)
    path = devices._cache_path("cuda")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_plain(CARD)))
    return wanted


def nvml(monkeypatch: pytest.MonkeyPatch, uuid: str, limit_mw: int) -> None:
    card = Card(uuid, {**H200, "PowerManagementLimit": limit_mw})
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml(card))


def test_a_gpu_that_is_as_it_was_is_not_described_again(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    nvml(monkeypatch, "GPU-1", 700_000)
    assert devices.find_device("cuda") == CARD
    assert asked == []


def test_another_power_limit_is_seen_although_the_device_is_cached(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    nvml(monkeypatch, "GPU-1", 500_000)
    assert devices.find_device("cuda").power_limit_w == 500.0
    assert asked == ["cuda"]


def test_another_card_in_its_place_is_seen_although_the_device_is_cached(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    nvml(monkeypatch, "GPU-2", 700_000)
    devices.find_device("cuda")
    assert asked == ["cuda"]


def test_machines_that_share_a_home_do_not_share_a_device(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    monkeypatch.setattr(devices.platform, "node", lambda: "another-node")
    devices.find_device("cuda")
    assert asked == ["cuda"]
