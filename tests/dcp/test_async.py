"""Asynchronous saves: values are those at the call, overlapping saves stay apart, errors come out of the future."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank
from ranks import run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from guarddcp import Guard, GuardedReader, GuardedWriter, inspect_checkpoint, verify
from guarddcp.errors import CheckpointExistsError, GuardError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Gate(DefaultSavePlanner):
    """Holds a save in write_data until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.arrived.set()
        assert self.go.wait(60)
        return super().resolve_data(write_item)


def state(fill: float) -> dict[str, Any]:
    return {"w": torch.full((5000,), fill), "optim": adam().state_dict(), "note": {"at": fill, "list": [1, 2]}}


def check(path: Any, expected: dict[str, Any]) -> None:
    target = blank(expected)
    dcp.load(target, storage_reader=GuardedReader(path))
    assert_same(target, expected)


def test_values_are_those_at_the_call(tmp_path: Path) -> None:
    live, gate, writer = state(1.0), Gate(), GuardedWriter(tmp_path / "ck", Guard(codec="exact"))
    future = dcp.async_save(live, storage_writer=writer, planner=gate)
    live["w"].fill_(-1.0)
    live["note"]["at"] = -1.0
    live["optim"]["param_groups"][0]["lr"] = 77.0
    live["optim"]["state"][0]["exp_avg"].zero_()
    live["optim"]["state"][0]["step"].add_(5)
    gate.go.set()
    metadata = future.result(60)
    check(tmp_path / "ck", state(1.0))
    assert metadata.guard_report == inspect_checkpoint(tmp_path / "ck")


def test_overlapping_saves_of_one_writer_stay_apart(tmp_path: Path) -> None:
    writer = GuardedWriter(tmp_path / "unused", Guard(codec="exact"))
    gates = {name: Gate() for name in "ab"}
    futures = {
        name: dcp.async_save(state(fill), checkpoint_id=tmp_path / name, storage_writer=writer, planner=gates[name])
        for fill, name in enumerate("ab")
    }
    for gate in gates.values():
        assert gate.arrived.wait(60)  # both are in write_data now
    for name in "ba":
        gates[name].go.set()
        metadata = futures[name].result(60)
        assert metadata.storage_meta.checkpoint_id == str(tmp_path / name)
    for fill, name in enumerate("ab"):
        check(tmp_path / name, state(fill))
        assert len(list((tmp_path / name).iterdir())) == 2
    assert not (tmp_path / "unused").exists()


def test_a_save_in_the_caller_does_not_disturb_one_in_the_background(tmp_path: Path) -> None:
    writer, gate = GuardedWriter(tmp_path / "main", Guard(codec="exact")), Gate()
    future = dcp.async_save(state(1.0), checkpoint_id=tmp_path / "back", storage_writer=writer, planner=gate)
    assert gate.arrived.wait(60)
    dcp.save(state(2.0), storage_writer=writer)
    gate.go.set()
    future.result(60)
    check(tmp_path / "main", state(2.0))
    check(tmp_path / "back", state(1.0))


def test_errors_come_out_of_the_future(tmp_path: Path) -> None:
    dcp.save(state(1.0), storage_writer=GuardedWriter(tmp_path / "ck"))
    future = dcp.async_save(state(2.0), storage_writer=GuardedWriter(tmp_path / "ck"))
    with pytest.raises(CheckpointException) as caught:
        future.result(60)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointExistsError)
    future = dcp.async_save({"x": range(3)}, storage_writer=GuardedWriter(tmp_path / "b", allow_pickle=False))
    with pytest.raises(CheckpointException, match="x: a value without a plain form can only be stored as pickle"):
        future.result(60)
    assert list(tmp_path.glob("b/*")) == []


def on_ranks(rank: int, num_ranks: int, path: str) -> None:
    live = state(1.0) | {f"own{rank}": torch.full((9,), rank)}
    writer = GuardedWriter(f"{path}/unused", Guard(codec="exact"))
    for save in range(2):
        future = dcp.async_save(live, checkpoint_id=f"{path}/{save}", storage_writer=writer)
        expected = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in live.items()}
        live["w"].add_(1)
        assert future.result(60).guard_report.exact.coordinates > 0
        check(f"{path}/{save}", expected)
    future = dcp.async_save(live, checkpoint_id=f"{path}/0", storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        future.result(60)
    assert [type(error) for error, _ in caught.value.failures.values()] == [CheckpointExistsError]
    dist.barrier()


def test_threads_on_ranks(tmp_path: Path) -> None:
    run_ranks(2, on_ranks, str(tmp_path))
    assert verify(tmp_path / "1").ok


def in_a_process(rank: int, num_ranks: int, path: str) -> None:
    live = state(1.0)
    writer = GuardedWriter(f"{path}/ck", optimizer=torch.optim.AdamW([torch.zeros(1)]))
    kind = AsyncCheckpointerType.PROCESS
    future = dcp.async_save(live, storage_writer=writer, async_checkpointer_type=kind)
    live["w"].fill_(-1.0)
    metadata = future.result(120)
    assert metadata.guard_report.moments.coordinates == 1800
    assert metadata.guard_report == inspect_checkpoint(f"{path}/ck")
    target = {"w": torch.zeros(5000)}
    dcp.load(target, storage_reader=GuardedReader(f"{path}/ck"))
    assert_same(target["w"], state(1.0)["w"])
    with pytest.raises(CheckpointException) as caught:
        dcp.async_save(live, storage_writer=writer, async_checkpointer_type=kind).result(60)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, GuardError)
    assert isinstance(error, CheckpointExistsError)
    assert "overwrite=True" in str(error)


def test_a_spawned_process(tmp_path: Path) -> None:
    run_ranks(1, in_a_process, str(tmp_path), timeout_s=200)
    assert verify(tmp_path / "ck").ok
