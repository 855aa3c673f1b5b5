"""Optimizer state dicts in all layouts, on all meshes, with uneven and empty shards; and what the report counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import local
from jobs import adam, assert_same, blank, dump, round_trip, undump
from ranks import run_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from guarddcp import Guard, GuardedReader, GuardedWriter, inspect_checkpoint, verify
from guarddcp.dcp import saving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXACT = {"guard": Guard(codec="exact")}

# ---- layouts, in one process


def job(seed: int = 0, *, train: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``down.weight`` is frozen, ``head`` never gets a gradient: neither has moments."""
    torch.manual_seed(seed)
    model = jobs.Net()
    model.down.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3 if train else 0):
        for name, p in model.named_parameters():
            if not name.startswith("head") and p.requires_grad:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return model, optimizer


def optimizer_dict(model: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> dict[str, Any]:
    if layout == "int":
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=jobs.FLAT if layout == "flat" else jobs.NESTED)


GUARDED = {"nested": ("embed.weight", "up.weight"), "flat": ("embed.weight", "up.weight"), "int": ("0", "1")}


@pytest.mark.parametrize("layout", GUARDED)
@pytest.mark.parametrize("depth", [0, 2])
def test_layouts_at_any_depth(tmp_path: Path, layout: str, depth: int) -> None:
    state = optimizer_dict(*job(), layout)
    for name in ("optim", "job")[:depth]:
        state = {name: state}
    loaded, report = round_trip(state, tmp_path / "guarded")
    guarded = {name for name, one in report.parameters.items() if one.evidence == "proved"}
    assert guarded == set(GUARDED[layout])
    assert report.moments.coordinates == 29 * 24 + 62 * 24
    assert verify(tmp_path / "guarded").moments == report.moments
    loaded, report = round_trip(state, tmp_path / "exact", writer=EXACT)
    assert_same(loaded, state)


def test_fresh_optimizer_takes_over(tmp_path: Path) -> None:
    """As a restarted job does: groups, frozen parameters and parameters without state included."""
    model, optimizer = job()
    state = {"optim": optimizer_dict(model, optimizer, "nested")}
    dcp.save(state, storage_writer=GuardedWriter(tmp_path / "ck", **EXACT))
    fresh_model, fresh = job(1, train=False)
    target = {"optim": blank(state["optim"])}
    dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck"))
    set_optimizer_state_dict(fresh_model, fresh, target["optim"], options=StateDictOptions(strict=False))
    before, after = optimizer.state_dict(), fresh.state_dict()
    assert_same(after["state"][0], before["state"][0])
    assert after["param_groups"] == before["param_groups"]


def test_two_optimizers_side_by_side(tmp_path: Path) -> None:
    state = {"generator": adam().state_dict(), "critic": adam(betas=(0.5, 0.9), lr=1.0).state_dict()}
    _, report = round_trip(state, tmp_path / "ck")
    assert set(report.parameters) == {"0", "1", "critic.state.0", "critic.state.1"}
    assert report.certificates >= 2


# ---- the report


def test_stored_bytes_are_those_of_the_files_and_raw_bytes_those_of_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    state = {"optim": adam(shapes=((64, 64), (3, 3))).state_dict(), "big": torch.randn(9000), "i": torch.arange(9)}
    writer = GuardedWriter(path)
    metadata = dcp.save(state, storage_writer=writer)
    report = metadata.guard_report
    assert report.moments.coordinates == 64 * 64
    assert report.moments.raw_bytes == 8 * 64 * 64
    values = 14 * 15  # numbers and flags of the param group as text; of their order of size
    tensors = 4 * 9000 + 8 * 9 + 2 * 4 + 2 * 4 * 9
    assert tensors < report.exact.raw_bytes < tensors + 3 * values
    on_disk = sum(file.stat().st_size for file in path.glob("*.gdcp"))
    assert report.moments.stored_bytes + report.exact.stored_bytes == on_disk
    assert report.parameters["0"].stored_bytes <= report.moments.stored_bytes < report.moments.raw_bytes
    assert report.exact.coordinates == 9000 + 9 + 2 + 2 * 9


def test_report_is_the_same_wherever_it_is_asked_for(tmp_path: Path) -> None:
    writer, reader = GuardedWriter(tmp_path / "ck"), GuardedReader(tmp_path / "ck")
    metadata = dcp.save({"optim": adam().state_dict()}, storage_writer=writer)
    assert writer.report is metadata.guard_report
    assert inspect_checkpoint(tmp_path / "ck") == writer.report
    dcp.load({"optim": blank(adam().state_dict())}, storage_reader=reader)
    assert reader.report is not None
    assert reader.report.moments.coordinates == writer.report.moments.coordinates
    assert reader.report.parameters == writer.report.parameters
    assert reader.report.bytes_fetched >= reader.report.bytes_asked > 0
    assert reader.report.to_json().startswith("{")


def test_report_of_one_load_does_not_count_the_last_one(tmp_path: Path) -> None:
    dcp.save({"x": torch.randn(9000)}, storage_writer=GuardedWriter(tmp_path / "ck"))
    reader, asked = GuardedReader(tmp_path / "ck"), set()
    for _ in range(2):
        dcp.load({"x": torch.zeros(9000)}, storage_reader=reader)
        asked.add(reader.report.bytes_asked)
    assert len(asked) == 1


def test_a_part_of_a_parameter_costs_a_part_of_its_bytes(tmp_path: Path) -> None:
    state = {"x": torch.randn(3_000_000), "optim": adam().state_dict()}
    dcp.save(state, storage_writer=GuardedWriter(tmp_path / "ck"))
    reader = GuardedReader(tmp_path / "ck")
    loaded = {"optim": blank(adam().state_dict())}
    dcp.load(loaded, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert reader.report.bytes_fetched < 200_000


# ---- meshes


def meshes(rank: int, num_ranks: int) -> dict[str, tuple[Any, list[Any]]]:
    """Name -> (mesh, placements) on 4 ranks."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicated": (flat, [Replicate()]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "2-D": (square, [Shard(0), Shard(1)]),
        "2-D same axis": (square, [Shard(0), Shard(0)]),
        "2-D swapped": (square, [Shard(1), Shard(0)]),
    }


SIZES = ((5, 1), (1, 70), (3, 400), (37, 41), (130, 2))


def tensors(fill: float | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = {}
    for size in SIZES:
        v = torch.rand(size, generator=generator) * 10.0 ** torch.randint(-9, 0, (size[0], 1), generator=generator)
        m = torch.randn(size, generator=generator) * v.sqrt()
        made[str(size)] = {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": v}
    return blank(made) if fill is not None else made


GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}


def sharded(made: dict[str, Any], mesh: Any, placements: list[Any]) -> dict[str, Any]:
    state = {
        name: {k: distribute_tensor(t, mesh, placements) if t.ndim else t for k, t in entry.items()}
        for name, entry in made.items()
    }
    return {"state": state, "param_groups": [GROUP | {"decoupled_weight_decay": True, "params": list(state)}]}


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {name: jobs.full(entry) for name, entry in state["state"].items()}


def reshard_all(rank: int, num_ranks: int, path: str) -> dict[str, Any]:
    """Save on every mesh; load each on the next mesh: exactly, and guarded. Returns reports and guarded states.

    In tiny frames: shards of many frames, frames of part of a row, boxes that cut frames.
    """
    saving.EXACT_FRAME_BYTES, saving.SMALL_BYTES, saving.ratio.FRAME_COORDINATES = 600, 100, 90
    out: dict[str, Any] = {}
    layouts = list(meshes(rank, num_ranks).items())
    for (name, (mesh, placements)), (_, other) in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        state = sharded(tensors(), mesh, placements)
        for writer in ({}, EXACT):
            here = f"{path}/{name} {bool(writer)}"
            metadata = dcp.save(state, storage_writer=GuardedWriter(here, **writer))
            assert metadata.state_dict_metadata == GuardedReader(here).read_metadata().state_dict_metadata, name
            target = sharded(tensors(0.0), *other)
            dcp.load(target, storage_reader=GuardedReader(here))
            if writer:
                assert_same(whole(target), tensors(), f"{name} rank {rank}")
            else:
                out[name] = metadata.guard_report.to_dict(), dump(whole(target))
    return out


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("meshes"))
    return path, run_ranks(4, reshard_all, path)


MESHES = ("rows", "columns", "replicated", "hsdp", "2-D", "2-D same axis", "2-D swapped")


@pytest.mark.parametrize("mesh", MESHES)
def test_uneven_and_empty_shards_from_mesh_to_mesh(resharded: tuple[str, Any], mesh: str) -> None:
    path, results = resharded
    report, state = results[0][mesh]
    assert all(result[mesh] == (report, state) for result in results)  # on all ranks alike
    assert verify(f"{path}/{mesh} False").certified_bound == report["certified_bound"] <= 0.01
    counted = sum(entry["coordinates"] for entry in report["parameters"].values())
    assert counted == sum(math.prod(size) for size in SIZES)
    restored = undump(state)
    alone = {"state": blank(tensors())}
    dcp.load(alone, storage_reader=GuardedReader(f"{path}/{mesh} False"))
    assert_same(restored, alone["state"])  # whatever the mesh, the same bits
    for name, entry in tensors().items():
        q, q_restored = (e["exp_avg"] / e["exp_avg_sq"].sqrt() for e in (entry, restored[name]))
        assert float((q - q_restored).abs().max()) < 0.1, name
        assert torch.allclose(entry["exp_avg_sq"], restored[name]["exp_avg_sq"], rtol=0.1), name


def hand_built(rank: int, num_ranks: int, path: str) -> None:
    """FSDP1's layout: flat parameters cut anywhere, on 3 ranks, several shards on one rank, one rank without any."""
    pieces = {0: [(0, 500), (500, 300)], 1: [], 2: [(800, 1)]}

    def of(values: torch.Tensor, mine: list[tuple[int, int]]) -> Any:
        shards = [LocalShard.from_tensor_and_offsets(values[b : b + n].clone(), [b], rank) for b, n in mine]
        return init_from_local_shards(shards, 801)

    v = torch.rand(801, generator=torch.Generator().manual_seed(0)) + 1e-3
    m = torch.randn(801, generator=torch.Generator().manual_seed(1)) * v.sqrt()
    groups = [GROUP | {"decoupled_weight_decay": True, "params": ["w"]}]
    for writer in ({}, EXACT):
        made = {"step": torch.tensor(4.0), "exp_avg": of(m, pieces[rank]), "exp_avg_sq": of(v, pieces[rank])}
        metadata = dcp.save(
            {"state": {"w": made}, "param_groups": groups},
            storage_writer=GuardedWriter(f"{path}{bool(writer)}", **writer),
        )
        other = {0: [(0, 100)], 1: [(100, 701)], 2: []}[rank]
        zeros = torch.zeros(801)
        target = {"step": torch.tensor(0.0), "exp_avg": of(zeros, other), "exp_avg_sq": of(zeros, other)}
        dcp.load({"state": {"w": target}}, storage_reader=GuardedReader(f"{path}{bool(writer)}"))
        if writer:
            for name, values in (("exp_avg", m), ("exp_avg_sq", v)):
                for piece, (begin, length) in zip(local(target[name]), other, strict=True):
                    assert_same(piece, values[begin : begin + length])
        else:
            assert metadata.guard_report.moments.coordinates == 800  # the shard of one entry is packed as it is
    assert metadata.guard_report.moments.coordinates == 0
    dist.barrier()


def test_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    run_ranks(3, hand_built, str(tmp_path / "ck"))
    report = verify(tmp_path / "ckFalse")
    assert report.moments.coordinates == 800
    assert report.parameters["w"].coordinates == 801
    assert report.parameters["w"].evidence == "mixed"
