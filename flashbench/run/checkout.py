"""Git revisions as folders that a worker can run from: temporary worktrees, removed afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashbench.errors import UsageError, nearest
from flashbench.run.process import Launch

MEASURING = ("flashbench/measure", "flashbench/run")
"""What times a case: where two revisions differ in it, a change of time may come from there."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A revision, or the working tree, laid out as a folder."""

    label: str
    """`main (1a2b3c4)`, or `working tree`."""
    root: Path
    folder: Path
    """Where in it the command was called."""

    def launch(self, python: str) -> Launch:
        """Workers that import from this checkout before anything that is installed."""
        source = self.root / "src"
        paths = (*([str(source)] if source.is_dir() else []), str(self.root))
        return Launch(python, paths, self.folder)


@contextlib.contextmanager
def checked_out(ref: str | None, option: str) -> Iterator[Checkout]:
    """The revision `ref` in a temporary worktree, or the working tree for None. UsageError outside a repository and for an unknown ref."""
    root = Path(_git("rev-parse", "--show-toplevel", option=option))
    prefix = _git("rev-parse", "--show-prefix", option=option)
    if ref is None:
        yield Checkout("working tree", root, root / prefix)
        return
    commit = commit_of(ref, option)
    with tempfile.TemporaryDirectory(prefix="flashbench-") as holder:
        tree = Path(holder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit, option=option)
        try:
            folder = tree / prefix
            label = ref if commit.startswith(ref) else f"{ref} ({commit[:9]})"
            yield Checkout(label, tree, folder if folder.is_dir() else tree)
        finally:
            _run("worktree", "remove", "--force", str(tree))


def measuring_differences(base: str, new: str | None) -> list[str]:
    """Files of flashbench's own measuring code in which two revisions differ; `new` None is the working tree. Empty in other projects."""
    done = _run("diff", "--name-only", base, *([new] if new else []), "--", *(f":/{path}" for path in MEASURING))
    return done.stdout.split() if done.returncode == 0 else []


def commit_of(ref: str, option: str) -> str:
    """The commit that a ref names now; UsageError for an unknown one."""
    done = _run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if done.returncode == 0:
        return done.stdout.strip()
    names = _run("for-each-ref", "--format=%(refname:short)").stdout.split()
    raise UsageError(f"{option}: '{ref}' is no revision of this repository{nearest(ref, names)}")


def _git(*arguments: str, option: str) -> str:
    done = _run(*arguments)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"{option}: git {arguments[0]} failed: {words}")
    return done.stdout.strip()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("git is not installed, and comparing revisions needs it") from None
