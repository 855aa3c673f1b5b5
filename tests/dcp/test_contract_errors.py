"""An error in any hook, on any rank or thread, stops all ranks, keeps its type, commits nothing and cleans up."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failure, failures
from ranks import run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner

from guarddcp import GuardedReader, GuardedWriter, verify
from guarddcp.dcp import saving
from guarddcp.dcp import writer as writers
from guarddcp.dcp.opening import read_manifest
from guarddcp.errors import CheckpointExistsError, GuardError, IntegrityError
from guarddcp.storage import commit as commits
from guarddcp.storage.store import Store
from guarddcp.storage.writers import LocalWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def job(rank: int = 0) -> dict[str, Any]:
    own = {f"own{rank}": torch.full((9000,), float(rank)), f"more{rank}": torch.full((9000,), float(rank))}
    return {"optim": adam(shapes=((50, 60), (30,))).state_dict(), "epoch": 3} | own


def files(path: Path | str) -> list[str]:
    return sorted(entry.name for entry in Path(path).glob("*"))


class Unpicklable(Exception):
    """As client libraries raise: it cannot be made again from its arguments."""

    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(text)
        self.code = code


# ---- hooks of one rank

SAVE_HOOKS = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
LOAD_HOOKS = ("set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def failing(base: type, hook: str, error: BaseException) -> type:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise error

    return type("Failing", (base,), {hook: fail})


def fail_in_hooks(rank: int, num_ranks: int, path: str) -> None:
    live = job(rank)
    dcp.save(live, storage_writer=GuardedWriter(f"{path}/good"))
    for hook in SAVE_HOOKS:
        here = 0 if hook in ("prepare_global_plan", "finish") else 1
        kind = failing(GuardedWriter, hook, IntegrityError("no luck", where=f"rank {rank}")) if rank == here else None
        writer = (kind or GuardedWriter)(f"{path}/{hook}")
        (error,) = failures(dcp.save, live, storage_writer=writer)
        assert type(error) is IntegrityError, hook
        assert (str(error), error.where) == (f"rank {here}: no luck", f"rank {here}"), hook
    for hook in LOAD_HOOKS:
        here = 0 if hook == "prepare_global_plan" else 1
        kind = failing(GuardedReader, hook, KeyboardInterrupt()) if rank == here else None
        (error,) = failures(dcp.load, blank(live), storage_reader=(kind or GuardedReader)(f"{path}/good"))
        assert type(error) is KeyboardInterrupt, hook
    dist.barrier()


def test_errors_in_any_hook_reach_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, fail_in_hooks, str(tmp_path))
    for hook in SAVE_HOOKS:
        assert ".metadata" not in files(tmp_path / hook), hook
    assert len(files(tmp_path / "write_data")) == 1  # that of rank 0; rank 1 had no chance


def fail_inside(rank: int, num_ranks: int, path: str) -> dict[str, str]:
    """Errors from the planner, a worker thread, the disk and the optimizer's state, on the last rank."""
    live, last, said = job(rank), rank == num_ranks - 1, {}

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if last and write_item.index.fqn == f"more{rank}":
                raise Unpicklable(7, text="the link is down")
            return super().resolve_data(write_item)

    def encode_exact(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("in a thread")

    def write(self: Any, view: memoryview) -> None:
        if self._offset > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        real_write(self, view)

    real_encode, real_write = saving.encode_exact, LocalWriter._write
    for name in ("planner", "thread", "disk"):
        if last and name == "thread":
            saving.encode_exact = encode_exact
        if last and name == "disk":
            LocalWriter._write = write
        planner = Planner() if name == "planner" else None
        (error,) = failures(dcp.save, live, storage_writer=GuardedWriter(f"{path}/{name}"), planner=planner)
        saving.encode_exact, LocalWriter._write = real_encode, real_write
        assert isinstance(error, GuardError), name
        said[name] = str(error)
    check = GuardedWriter(f"{path}/after")
    dcp.save(live, storage_writer=check)  # nothing is left over from what failed
    return said


def test_errors_inside_write_data_are_wrapped_and_take_back_that_ranks_file(tmp_path: Path) -> None:
    said = run_ranks(3, fail_inside, str(tmp_path))
    assert said[0] == said[1] == said[2]
    assert said[0]["planner"] == "rank 2, more2: could not save: Unpicklable: the link is down"
    assert "ZeroDivisionError: in a thread" in said[0]["thread"]
    assert "rank 2, " in said[0]["thread"]
    assert "OSError: [Errno 28] No space left on device: " in said[0]["disk"]
    for name in ("planner", "thread", "disk"):
        assert ".metadata" not in files(tmp_path / name)
        assert len(files(tmp_path / name)) == 2, name
    assert verify(tmp_path / "after").ok


def test_error_of_the_last_fsync_is_wrapped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalWriter, "_close", close)
    error = failure(dcp.save, job(), storage_writer=GuardedWriter(tmp_path / "ck"))
    assert type(error) is GuardError
    assert str(error).startswith(f"rank 0, {tmp_path}/ck/")
    assert ".gdcp: could not write: OSError: [Errno 5] Input/output error" in str(error)
    assert files(tmp_path / "ck") == []


# ---- reading


def load_before(rank: int, num_ranks: int, path: str) -> None:
    live = {"all": torch.arange(9000.0), f"own{rank}": torch.randn(9000)}
    dcp.save(live, storage_writer=GuardedWriter(path))
    dist.barrier()
    if rank == 0:
        _flip_in_shard_of(path, "own1")
    dist.barrier()
    target = blank(live)
    (error,) = failures(dcp.load, target, storage_reader=GuardedReader(path, verify="before"))
    assert type(error) is IntegrityError
    assert "own1 at (0,) frame 0" in str(error)
    assert "undefined" not in str(error)
    assert_same(target, blank(live))  # on every rank
    (error,) = failures(dcp.load, target, storage_reader=GuardedReader(path))
    assert type(error) is IntegrityError
    assert str(error).endswith("The load stopped; what the targets hold is undefined")
    dist.barrier()


def _flip_in_shard_of(path: str, key: str) -> None:
    """Flip a byte in the record that holds a tensor."""
    manifest = read_manifest(Store(path))
    record = manifest.shard(manifest.find(key, (0,)))
    _, end = manifest.record_begins()[record.file, record.record]
    file = Path(path) / manifest.files[record.file].name
    data = bytearray(file.read_bytes())
    data[end - 20] ^= 1
    file.write_bytes(data)


def test_damage_that_one_rank_sees_stops_all(tmp_path: Path) -> None:
    run_ranks(2, load_before, str(tmp_path / "ck"))


# ---- committing


def test_errors_in_finish_take_back_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ck"
    dcp.save(job(), storage_writer=GuardedWriter(path))
    before = files(path)

    def replace(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(commits.os, "replace", replace)
        error = failure(dcp.save, job(), storage_writer=GuardedWriter(path, overwrite=True))
    assert "Input/output error" in str(error)
    assert files(path) == before
    assert verify(path).ok


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_took_effect_and_failed_afterwards_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "ck"
    if overwrite:
        dcp.save(job(), storage_writer=GuardedWriter(path))
    calls = []

    def sync_folder(folder: str) -> None:
        calls.append(folder)
        if len(calls) == 2:  # after the manifest is in its place
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(commits, "sync_folder", sync_folder)
        error = failure(dcp.save, job(1), storage_writer=GuardedWriter(path, overwrite=overwrite))
    assert isinstance(error, OSError)
    assert verify(path).ok  # what stands there is whole
    target = blank(job(1))
    dcp.load(target, storage_reader=GuardedReader(path))
    assert_same(target["own1"], job(1)["own1"])


def test_the_loser_of_a_race_takes_back_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ck"
    real, after = commits._publish_new, []

    def publish_new(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(commits, "_publish_new", real)
            dcp.save({"winner": 1}, storage_writer=GuardedWriter(path))
        after.extend(files(path))
        real(*args)

    monkeypatch.setattr(commits, "_publish_new", publish_new)
    error = failure(dcp.save, job(), storage_writer=GuardedWriter(path))
    assert isinstance(error, CheckpointExistsError)
    assert len(files(path)) == 2
    assert set(files(path)) < set(after)
    target = {"winner": 0}
    dcp.load(target, storage_reader=GuardedReader(path))
    assert target == {"winner": 1}


def test_overwritten_while_reading_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ck"
    dcp.save(job(), storage_writer=GuardedWriter(path))

    class Overwritten(GuardedReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            dcp.save(job(), storage_writer=GuardedWriter(path, overwrite=True))
            return super().read_data(plan, planner)

    error = failure(dcp.load, blank(job()), storage_reader=Overwritten(path))
    assert type(error) is IntegrityError
    assert "the checkpoint was overwritten while reading" in str(error)
    assert "Load again" in str(error)


def read_two_manifests(rank: int, num_ranks: int, path: str) -> None:
    live = {"w": torch.full((9000,), 1.0)}
    dcp.save(live, storage_writer=GuardedWriter(path))
    writers.__dict__["_delete"] = lambda *args: None  # the old files are still there when the other rank looks

    class Slow(GuardedReader):
        def read_metadata(self) -> Any:
            if rank == 1:
                dist.barrier()
                return super().read_metadata()
            metadata = super().read_metadata()
            new = {"w": torch.full((9000,), 2.0)}
            dcp.save(new, storage_writer=GuardedWriter(path, overwrite=True), no_dist=True)
            dist.barrier()
            return metadata

    target = blank(live)
    (error,) = failures(dcp.load, target, storage_reader=Slow(path))
    assert type(error) is IntegrityError
    assert "the checkpoint was overwritten while the ranks read its manifest" in str(error)
    assert_same(target, blank(live))
    dist.barrier()


def test_ranks_that_read_different_checkpoints_restore_neither(tmp_path: Path) -> None:
    run_ranks(2, read_two_manifests, str(tmp_path / "ck"))


@pytest.mark.parametrize("verify_level", ["full", "before"])
def test_a_missing_file_is_named(tmp_path: Path, verify_level: Any) -> None:
    path = tmp_path / "ck"
    dcp.save(job(), storage_writer=GuardedWriter(path))
    (file,) = path.glob("*.gdcp")
    file.unlink()
    target = blank(job())
    error = failure(dcp.load, target, storage_reader=GuardedReader(path, verify=verify_level))
    assert type(error) is IntegrityError
    assert f"{path}: a data file of the checkpoint is missing" in str(error)
    assert file.name in str(error)
    assert_same(target, blank(job()))
