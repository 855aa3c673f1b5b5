"""Any path or URL, missing ones, and what is already there: refused, replaced, left alone."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import assert_same, failure, round_trip
from torch.distributed.checkpoint import FileSystemWriter

from guarddcp import GuardedReader, GuardedWriter, inspect_checkpoint, verify
from guarddcp.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, GuardError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((70, 70), fill), "b": torch.full((3,), fill)}, "epoch": int(fill)}


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def addresses(tmp_path: Path) -> dict[str, Any]:
    return {
        "Path": tmp_path / "a" / "b",
        "str": str(tmp_path / "c"),
        "file://": f"file://{tmp_path}/d",
        "memory://": f"memory://{uuid.uuid4().hex}/step-1",
        "trailing slash": f"{tmp_path}/e/",
    }


@pytest.mark.parametrize("kind", ["Path", "str", "file://", "memory://", "trailing slash"])
def test_any_path_or_url(tmp_path: Path, kind: str) -> None:
    path = addresses(tmp_path)[kind]
    loaded, report = round_trip(state(), path)
    assert_same(loaded, state())
    assert verify(path).exact == inspect_checkpoint(path).exact == report.exact
    error = failure(dcp.save, state(), storage_writer=GuardedWriter(path))
    assert isinstance(error, CheckpointExistsError)
    dcp.save(state(2), storage_writer=GuardedWriter(path, overwrite=True))
    target = state(0)
    dcp.load(target, storage_reader=GuardedReader(path))
    assert_same(target, state(2))


@pytest.mark.parametrize("kind", ["Path", "file://", "memory://"])
@pytest.mark.parametrize("verify_level", ["full", "before"])
def test_missing_path(tmp_path: Path, kind: str, verify_level: Any) -> None:
    path = addresses(tmp_path)[kind]
    error = failure(dcp.load, state(), storage_reader=GuardedReader(path, verify=verify_level))
    assert type(error) is CheckpointNotFoundError
    assert isinstance(error, FileNotFoundError)
    assert f"{path}/.metadata: no complete checkpoint: there is no manifest" in str(error)
    for look in (verify, inspect_checkpoint):
        with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
            look(path)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    error = failure(dcp.load, state(), storage_reader=GuardedReader(tmp_path / "file"))
    assert type(error) is CheckpointNotFoundError
    error = failure(dcp.save, state(), storage_writer=GuardedWriter(tmp_path / "file"))
    assert isinstance(error, GuardError)
    assert "NotADirectoryError" in str(error)


def test_a_url_that_lost_a_slash_is_refused_at_once() -> None:
    for make in (GuardedWriter, GuardedReader):
        with pytest.raises(FormatError, match="a URL with one slash; expected s3://"):
            make(Path("s3://bucket/step"))


def test_overwrite_refuses_by_default_and_replaces_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    dcp.save(state(1), storage_writer=GuardedWriter(path))
    before = {name: (path / name).read_bytes() for name in names(path)}
    error = failure(dcp.save, state(2), storage_writer=GuardedWriter(path))
    assert isinstance(error, CheckpointExistsError)
    assert "Pass overwrite=True to replace it, or write to another path" in str(error)
    assert {name: (path / name).read_bytes() for name in names(path)} == before
    dcp.save(state(3), storage_writer=GuardedWriter(path, overwrite=True))
    assert names(path)[0] == ".metadata"
    assert len(names(path)) == len(before)
    assert not set(names(path)[1:]) & set(before)  # nothing of the old one is left


def test_overwriting_what_is_not_ours_leaves_the_rest_alone(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    dcp.save(state(), storage_writer=FileSystemWriter(path))
    stock = set(names(path)) - {".metadata"}
    assert isinstance(failure(dcp.save, state(2), storage_writer=GuardedWriter(path)), CheckpointExistsError)
    dcp.save(state(2), storage_writer=GuardedWriter(path, overwrite=True))
    assert stock < set(names(path))
    assert verify(path).ok
