"""What DCP expects of a storage pair on several ranks: plan caching, groups, coordinators, and who refuses what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failures
from ranks import run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from guarddcp import Guard, GuardedReader, GuardedWriter, verify
from guarddcp.errors import CheckpointExistsError, CheckpointNotFoundError, GuardError

EXACT = Guard(codec="exact")


def replicated(rank: int = 0) -> dict[str, Any]:
    """The same on all ranks, but for one key of each rank's own."""
    return {"optim": adam().state_dict(), "w": torch.arange(5000.0), f"rng{rank}": torch.full((9,), rank), "epoch": 3}


def with_shards() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.arange(600.0).reshape(20, 30), mesh, [Shard(0)])}


def check(path: str, live: dict[str, Any], **load: Any) -> None:
    target = blank(live)
    dcp.load(target, storage_reader=GuardedReader(path), **load)
    assert_same(target, live)


# ---- plan caching


class CachingOnRanks(DefaultSavePlanner):
    """Plans are cached by the planner's class name, for the life of a process and its forks."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def cached_saves(rank: int, num_ranks: int, path: str) -> None:
    live = replicated(rank)
    shared = GuardedWriter(f"{path}/unused", EXACT)
    for save in range(6):
        live["w"].add_(1)
        live["optim"]["state"][0]["exp_avg"].mul_(2)
        if rank == 1 and save in (2, 4):  # one rank's plan changes, the others go on with cached ones
            live.pop("extra", None) if save == 4 else live.update(extra=torch.ones(3))
        here = f"{path}/{save}"
        writer = GuardedWriter(here, EXACT) if save % 2 else shared
        metadata = dcp.save(live, checkpoint_id=here, storage_writer=writer, planner=CachingOnRanks())
        assert ("extra" in metadata.state_dict_metadata) == (save in (2, 3))
        assert metadata.storage_meta.checkpoint_id == here
        check(here, live)
    # behind the cached plan of the last rank alone, a moment changes its dtype
    if rank == num_ranks - 1:
        live["optim"]["state"][1]["exp_avg"] = live["optim"]["state"][1]["exp_avg"].half()
        live[f"rng{rank}"] = live[f"rng{rank}"].half()
    (error,) = failures(dcp.save, live, storage_writer=GuardedWriter(f"{path}/dtype", EXACT), planner=CachingOnRanks())
    assert type(error) is GuardError
    assert f"rank {num_ranks - 1}, rng{num_ranks - 1}: the tensor is not the one that was planned" in str(error)
    dist.barrier()


def test_plan_caching(tmp_path: Path) -> None:
    run_ranks(3, cached_saves, str(tmp_path))
    assert all(verify(tmp_path / str(save)).ok for save in range(6))
    assert not (tmp_path / "unused").exists()
    assert not (tmp_path / "dtype" / ".metadata").exists()
    assert len(list((tmp_path / "dtype").iterdir())) <= 2  # the failed rank's file is gone


# ---- groups and coordinators


def in_groups(rank: int, num_ranks: int, path: str) -> None:
    live = replicated(rank)
    subset = dist.new_group([1, 3])
    if rank in (1, 3):
        writer = GuardedWriter(f"{path}/subset", EXACT)
        metadata = dcp.save(live, storage_writer=writer, process_group=subset)
        assert {"rng1", "rng3"} < set(metadata.state_dict_metadata)
        check(f"{path}/subset", live, process_group=subset)
        assert (writer.report == metadata.guard_report) == (rank == 1)  # the others hold their share
    dist.barrier()

    metadata = _save_state_dict(live, GuardedWriter(f"{path}/other", EXACT), coordinator_rank=2)
    assert metadata.guard_report.exact.coordinates > 0
    target = blank(live)
    _load_state_dict(target, GuardedReader(f"{path}/other"), coordinator_rank=2)
    assert_same({key: target[key] for key in ("w", f"rng{rank}")}, {key: live[key] for key in ("w", f"rng{rank}")})

    dcp.save(live, storage_writer=GuardedWriter(f"{path}/alone{rank}", EXACT), no_dist=True)
    check(f"{path}/alone{rank}", live, no_dist=True)
    dist.barrier()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_process_groups_and_coordinators(tmp_path: Path) -> None:
    run_ranks(4, in_groups, str(tmp_path))
    for name in ("subset", "other", "alone0", "alone3"):
        assert verify(tmp_path / name).ok


def alone_at_one_path(rank: int, num_ranks: int, path: str) -> str:
    (error,) = failures(dcp.save, with_shards(), storage_writer=GuardedWriter(f"{path}/shards"), no_dist=True)
    assert "w: chunks hold" in str(error)
    assert "all ranks must take part in one save (no_dist=False)" in str(error)
    dist.barrier()
    try:
        dcp.save({"rank": rank, "w": torch.ones(30_000)}, storage_writer=GuardedWriter(f"{path}/race"), no_dist=True)
    except dcp.CheckpointException as caught:
        (error,) = (failure for failure, _ in caught.failures.values())
        assert isinstance(error, CheckpointExistsError)
        return "refused"
    return "saved"


def test_no_dist_inside_a_group(tmp_path: Path) -> None:
    outcome = run_ranks(3, alone_at_one_path, str(tmp_path))
    assert sorted(outcome) == ["refused", "refused", "saved"]
    assert verify(tmp_path / "race").ok
    assert len(list((tmp_path / "race").iterdir())) == 2  # what was refused left nothing
    assert list((tmp_path / "shards").iterdir()) == []


def without_collectives(rank: int, num_ranks: int, path: str) -> None:
    with pytest.raises(GuardError, match=r"use_collectives=False writes one checkpoint per rank.*no_dist=True"):
        dcp.save(replicated(rank), storage_writer=GuardedWriter(path), use_collectives=False)


# ---- refusals on all ranks


def unlike(rank: int, num_ranks: int, path: str) -> None:
    without_collectives(rank, num_ranks, f"{path}/collectives")
    for odd in range(num_ranks):
        for name in ("exp_avg", "exp_avg_sq"):
            live = {"optim": adam().state_dict()}
            if rank == odd:
                del live["optim"]["state"][0][name]
            (error,) = failures(dcp.save, live, storage_writer=GuardedWriter(f"{path}/replicas"))
            assert type(error) is GuardError
            assert "nothing was committed" in str(error)
            assert "chunk at (0, 0) written 2 times" in str(error)
            assert "All replicas must save the same keys" in str(error)
    errors = failures(dcp.load, {"x": torch.zeros(3)}, storage_reader=GuardedReader(f"{path}/nowhere"))
    assert [type(error) for error in errors] == [CheckpointNotFoundError] * num_ranks
    assert all(f"{path}/nowhere/.metadata: no complete checkpoint" in str(error) for error in errors)
    dist.barrier()


def test_unlike_replicas_missing_collectives_and_missing_paths(tmp_path: Path) -> None:
    run_ranks(3, unlike, str(tmp_path))
    assert list(tmp_path.glob("replicas/*")) == []
    assert not (tmp_path / "collectives").exists()


def degraded(rank: int, num_ranks: int, path: str) -> tuple[list[str], list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("guarddcp").addHandler(handler)
    live = {"optim": adam(amsgrad=True).state_dict(), f"odd{rank}": range(rank)}
    metadata = dcp.save(live, storage_writer=GuardedWriter(path))
    return heard, metadata.guard_report.warnings


def test_degradations_are_said_once_for_all_ranks(tmp_path: Path) -> None:
    heard, warnings = zip(*run_ranks(3, degraded, str(tmp_path / "ck")), strict=True)
    assert heard[1] == heard[2] == []
    assert heard[0] == [f"{tmp_path / 'ck'}: {line}" for line in warnings[0]]
    assert warnings[0] == warnings[1] == warnings[2]
    assert sorted(line.partition(":")[0] for line in warnings[0]) == ["amsgrad", "pickle"]
    assert any(line.endswith("[odd0, odd1, odd2]") for line in warnings[0])


def existing(rank: int, num_ranks: int, path: str) -> None:
    live = with_shards()
    metadata = dcp.save(live, storage_writer=GuardedWriter(path))
    found = GuardedReader(path).read_metadata()
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert (found.planner_data, found.storage_meta) == (metadata.planner_data, metadata.storage_meta)
    assert metadata.guard_report.exact.coordinates == 600
    (error,) = failures(dcp.save, live, storage_writer=GuardedWriter(path))
    assert isinstance(error, CheckpointExistsError)
    assert isinstance(error, FileExistsError)
    assert "overwrite=True" in str(error)
    live["w"].mul_(2)
    writer = GuardedWriter(path, overwrite=True)
    dcp.save(live, storage_writer=writer)
    assert writer.report.exact.coordinates == (600 if rank == 0 else live["w"].to_local().numel())
    target = with_shards()
    target["w"].zero_()
    dcp.load(target, storage_reader=GuardedReader(path))
    assert_same(target["w"].to_local(), live["w"].to_local())


def test_metadata_reports_and_overwriting(tmp_path: Path) -> None:
    run_ranks(3, existing, str(tmp_path / "ck"))
    assert len(list((tmp_path / "ck").iterdir())) == 1 + 3  # the manifest and one file for each rank
    assert verify(tmp_path / "ck").ok
