"""Triton decides at its import whether kernels are interpreted or compiled, so neither is done in the process that runs pytest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from forward_runs import start_interpreter

Interpreted = Callable[..., Any]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    """`interpreted(function, *arguments)` calls a module-level function in a process whose Triton interprets, bf16 repaired."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        environment.setenv("OPENBLAS_NUM_THREADS", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(start_interpreter).result()  # the process is born here, with that environment
    with pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()
