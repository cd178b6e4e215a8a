"""A stand-in for the module `pynvml` with cards of one's choice, for machines without a GPU. It remembers every call."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Card:
    """Answers by NVML call, with the call's name without `nvmlDeviceGet`; what is not there is 'Not Supported'."""

    uuid: str
    answers: dict[str, Any] = field(default_factory=dict)


H200 = {
    "Name": "NVIDIA H200",
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "PowerManagementLimitConstraints": [200_000, 700_000],
    "MaxClockInfo": 1980,
    "ClockInfo": 1965,
    "MemoryBusWidth": 6144,
    "MigMode": [0, 0],
    "EccMode": [1, 1],
    "PersistenceMode": 1,
    "ApplicationsClock": 1980,
    "DefaultApplicationsClock": 1980,
    "CurrentClocksEventReasons": 0,
    "ComputeRunningProcesses": [],
    "GraphicsRunningProcesses": [],
    "PowerUsage": 350_000,
    "Temperature": 40,
    "TotalEnergyConsumption": 5_000_000,
}


class FakeNvml(types.ModuleType):
    """`cards` in PCI order. `init_error` is what nvmlInit raises. `wants_bytes`: as in bindings of before 2021."""

    def __init__(self, *cards: Card, init_error: Exception | None = None, wants_bytes: bool = False) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.cards = cards
        self.init_error = init_error
        self.wants_bytes = wants_bytes
        self.calls: list[str] = []
        self.open = 0

    def nvmlInit(self) -> None:
        self.calls.append("nvmlInit")
        if self.init_error is not None:
            raise self.init_error
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.calls.append("nvmlShutdown")
        if self.open == 0:
            raise NVMLError("Uninitialized")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self.calls.append("nvmlDeviceGetHandleByIndex")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> Card:
        if self.wants_bytes and isinstance(uuid, str):
            raise TypeError("bytes or integer address expected instead of str instance")
        wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
        for card in self.cards:
            if card.uuid == wanted:
                return card
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDevice"):
            raise AttributeError(name)

        def answer(card: Card, *_arguments: Any) -> Any:
            self.calls.append(name)
            try:
                return card.answers[name.removeprefix("nvmlDeviceGet")]
            except KeyError:
                raise NVMLError("Not Supported") from None

        return answer
