"""The child process: one device, one round. It alone imports torch, and a crash of its CUDA context takes one case with it.

It reads one JSON message a line on stdin and answers on stdout; everything that libraries print goes to stderr. When stdin
closes, because the parent is done or was killed, it ends at once.

    python -m flashbench.run.worker --describe auto      prints the Device record of a device as JSON, and ends
    python -m flashbench.run.worker                      serves messages
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

STICKY_EXIT = 70
"""Exit code after an error that left the device unusable; the row has been sent."""


def main(arguments: list[str]) -> int:
    answers = _claim_stdout()
    if arguments[:1] == ["--describe"]:
        _describe(arguments[1], answers)
        return 0
    return _serve(answers)


def _claim_stdout() -> TextIO:
    """Keep the real stdout for messages, and point file descriptor 1 at stderr for everybody else."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message, allow_nan=False) + "\n")
    answers.flush()


def _describe(wanted: str, answers: TextIO) -> None:
    from flashbench.errors import FlashbenchError
    from flashbench.measure.device import describe
    from flashbench.records import to_plain

    try:
        _say(answers, {"device": to_plain(describe(wanted))})
    except FlashbenchError as error:
        _say(answers, {"error": str(error)})


def _serve(answers: TextIO) -> int:
    messages = _listen()
    import flashbench.measure.visit  # noqa: F401 - torch comes with it: seconds, which need not wait for a device

    start = messages.get()
    session = _open_session(start, answers)
    _say(answers, {"type": "ready"})
    while True:
        message = messages.get()
        if message["type"] == "ceilings":
            _measure_ceilings(session, answers)
            continue
        if message["type"] == "anchors":
            _measure_anchors(session, answers)
            continue
        serve = _try_blocks if message["type"] == "tune" else _visit
        if not serve(message, session, answers):
            return STICKY_EXIT


def _listen() -> queue.Queue[dict[str, Any]]:
    """Messages from stdin, read by a thread of its own so that the end of the parent ends a running kernel's process too."""
    messages: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            messages.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return messages


def _open_session(start: dict[str, Any], answers: TextIO) -> Any:
    from flashbench.measure.device import use
    from flashbench.measure.sampling import Rule
    from flashbench.measure.telemetry import Nvml
    from flashbench.measure.visit import Session, Settings
    from flashbench.records import Device, from_plain

    device = from_plain(Device, start["device"])
    use(device)
    # By field, because the parent may be a later version than this worker: `ab` runs old revisions.
    settings = from_plain(Settings, {**start["settings"], "rule": from_plain(Rule, start["settings"]["rule"])})
    return Session(
        device,
        settings,
        Nvml.open(device.uuid),
        announce=lambda stage: _say(answers, {"type": "stage", "stage": stage}),
    )


def _visit(message: dict[str, Any], session: Any, answers: TextIO) -> bool:
    """Measure one case and send its row. False when the device did not survive it."""
    import dataclasses

    from flashbench.errors import UsageError
    from flashbench.measure.device import still_works
    from flashbench.measure.visit import visit
    from flashbench.providers import slowed
    from flashbench.providers.table import get
    from flashbench.records import Case, Row, from_plain, to_plain

    case = from_plain(Case, message["case"])
    try:
        provider = slowed.get(case.provider) if slowed.is_slowed(case.provider) else get(case.provider)
        reason = provider.unsupported(case.problem, session.device)
    except UsageError as error:  # another revision's table need not have it
        reason = str(error)
    if reason:
        _say(
            answers, {"type": "row", "row": to_plain(Row(case, message["round"], "unsupported", reason)), "samples": []}
        )
        return True
    usual = session.settings
    if message.get("timer"):
        rule = dataclasses.replace(usual.rule, timer=message["timer"])
        session.settings = dataclasses.replace(usual, rule=rule)
    row, samples_ms = visit(case, provider, message["round"], session)
    session.settings = usual
    alive = still_works(session.device)
    if not alive:
        why = row.reason or "found after it had been measured"
        row, samples_ms = dataclasses.replace(row, status="crashed", reason=f"left the device in error: {why}"), []
    _say(answers, {"type": "row", "row": to_plain(row), "samples": samples_ms})
    return alive


def _try_blocks(message: dict[str, Any], session: Any, answers: TextIO) -> bool:
    """Check or time a kernel in given blocks. False when the device did not survive it."""
    from flashbench.measure.device import still_works
    from flashbench.measure.tune import answer

    found = answer(message, session)
    alive = still_works(session.device)
    if not alive:
        why = found.get("reason") or "found after its call"
        found = {"status": "crashed", "reason": f"left the device in error: {why}"}
    _say(answers, {"type": "tuned", **found})
    return alive


def _measure_anchors(session: Any, answers: TextIO) -> None:
    from flashbench.measure.anchors import measure_anchors
    from flashbench.records import to_plain

    anchors = measure_anchors(session.device, session.settings.rule, session.nvml)
    _say(answers, {"type": "anchors", "anchors": [to_plain(anchor) for anchor in anchors]})


def _measure_ceilings(session: Any, answers: TextIO) -> None:
    from flashbench.measure.ceilings import measure_ceilings
    from flashbench.records import to_plain

    session.forget()
    ceilings = measure_ceilings(session.device, session.nvml, session.announce)
    _say(answers, {"type": "ceilings", "ceilings": [to_plain(c) for c in ceilings]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
