"""Processes of their own that compile kernels: what they are given, and what they answer."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any


def figures_of(script: str, cases: object, *arguments: str) -> list[dict[str, Any]]:
    """What `script`, beside this file, says of each of the pickled cases, a JSON line each; fails with its words if it dies on the way."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        input=pickle.dumps(cases),
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        timeout=280,
        check=False,
    )
    done = [json.loads(line) for line in child.stdout.splitlines()]
    if child.returncode:
        after = done[-1]["name"] if done else "nothing"
        raise AssertionError(f"after {after}: exit code {child.returncode}\n{child.stderr.decode()[-3000:]}")
    return done
