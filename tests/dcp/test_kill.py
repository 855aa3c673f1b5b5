"""A save that is killed at any step leaves the checkpoint that was there, or the new one, whole; never a mixture."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failure
from ranks import RanksFailed, run_ranks

from guarddcp import Guard, GuardedReader, GuardedWriter, verify
from guarddcp.errors import CheckpointNotFoundError
from guarddcp.storage import commit as commits
from guarddcp.storage.store import Store
from guarddcp.storage.writers import LocalWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXACT = Guard(codec="exact")


def state(fill: float) -> dict[str, Any]:
    big = torch.rand(40_000, generator=torch.Generator().manual_seed(int(fill)))
    return {"big": big, "optim": adam(steps=1 + int(fill)).state_dict(), "epoch": fill}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts everything a save does to the disk, and dies at step ``fatal`` (0: never); writes die half done."""

    def __init__(self, fatal: int) -> None:
        self.count, self.fatal, self.names = 0, fatal, list[str]()

    def step(self, name: str) -> bool:
        self.count += 1
        self.names.append(name)
        return self.count == self.fatal

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.step(name):
                if name == "_write":
                    real(args[0], args[1][: len(args[1]) // 2])
                die()
            return real(*args, **kwargs)

        setattr(owner, name, watched)

    def watch_all(self) -> None:
        for owner, name in (
            (Store, "create"), (Store, "delete"), (LocalWriter, "_write"), (LocalWriter, "_close"),
            (os, "link"), (os, "replace"), (commits, "sync_folder"),
        ):  # fmt: skip
            self.watch(owner, name)


def in_child(job: Callable[[], None]) -> tuple[int, bytes]:
    """Fork, run, and return (signal that ended the child, what it wrote)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            job_bytes = job()
            os.write(writer, str(job_bytes or "").encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        return status & 0x7F, pipe.read()


def save_dying_at(path: Path, fatal: int, *, overwrite: bool) -> tuple[int, list[str]]:
    """The signal that ended the save, and (if none) the names of its steps."""

    def job() -> str:
        steps = Steps(fatal)
        steps.watch_all()
        dcp.save(state(1.0), storage_writer=GuardedWriter(path, EXACT, overwrite=overwrite, threads=1))
        return ",".join(steps.names)

    ended, text = in_child(job)  # type: ignore[arg-type]
    return ended, text.decode().split(",")


def restored(path: Path) -> dict[str, Any]:
    assert verify(path).ok
    target = blank(state(0.0))
    dcp.load(target, storage_reader=GuardedReader(path))
    return target


def num_steps(path: Path, *, overwrite: bool) -> int:
    if overwrite:
        dcp.save(state(0.0), storage_writer=GuardedWriter(path, EXACT))
    ended, names = save_dying_at(path, 0, overwrite=overwrite)
    assert ended == 0
    assert {"create", "_write", "_close", "sync_folder", "delete", "replace" if overwrite else "link"} <= set(names)
    assert_same(restored(path), state(1.0))
    return len(names)


def test_an_overwrite_killed_at_any_step(tmp_path: Path) -> None:
    outcomes = []
    for fatal in range(1, num_steps(tmp_path / "whole", overwrite=True) + 1):
        path = tmp_path / str(fatal)
        dcp.save(state(0.0), storage_writer=GuardedWriter(path, EXACT))
        ended, _ = save_dying_at(path, fatal, overwrite=True)
        assert ended == signal.SIGKILL
        found = restored(path)
        assert_same(found, state(found["epoch"]))
        outcomes.append(found["epoch"])
        dcp.save(state(2.0), storage_writer=GuardedWriter(path, EXACT, overwrite=True))  # and life goes on
        assert_same(restored(path), state(2.0))
    assert outcomes == sorted(outcomes)  # the old one up to the commit, the new one from then on
    assert outcomes[-1] == 1.0
    assert outcomes.count(0.0) > 10


def test_a_first_save_killed_at_any_step(tmp_path: Path) -> None:
    outcomes = []
    for fatal in range(1, num_steps(tmp_path / "whole", overwrite=False) + 1):
        path = tmp_path / str(fatal)
        ended, _ = save_dying_at(path, fatal, overwrite=False)
        assert ended == signal.SIGKILL
        complete = (path / ".metadata").exists()
        outcomes.append(complete)
        if complete:
            assert_same(restored(path), state(1.0))
            continue
        error = failure(dcp.load, blank(state(1.0)), storage_reader=GuardedReader(path))
        assert type(error) is CheckpointNotFoundError
        with pytest.raises(CheckpointNotFoundError, match="a save that did not finish leaves data files"):
            verify(path)
        dcp.save(state(1.0), storage_writer=GuardedWriter(path, EXACT))  # no overwrite needed
        assert_same(restored(path), state(1.0))
    assert outcomes == sorted(outcomes)
    assert outcomes[-1]


def killed_rank(rank: int, num_ranks: int, path: str) -> None:
    if rank == 1:
        steps = Steps(3)
        steps.watch_all()
    dcp.save({f"own{rank}": torch.rand(9000)}, storage_writer=GuardedWriter(path, overwrite=True))


def test_a_rank_killed_while_it_writes(tmp_path: Path) -> None:
    dcp.save(state(0.0), storage_writer=GuardedWriter(tmp_path / "ck", EXACT))
    with pytest.raises(RanksFailed, match=r"rank 1: no answer \(exit code -9\)"):
        run_ranks(2, killed_rank, str(tmp_path / "ck"), timeout_s=20)
    assert_same(restored(tmp_path / "ck"), state(0.0))
