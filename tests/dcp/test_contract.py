"""What DCP and its planners expect of a storage pair, in one process: planners, targets, strangers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import BarePlanner
from jobs import adam, assert_same, blank, failure, round_trip
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

from guarddcp import Guard, GuardedReader, GuardedWriter, verify
from guarddcp.errors import FormatError, GuardError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((70, 70), fill), "b": torch.full((3,), fill)}, "epoch": int(fill)}


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ---- writers, readers, planners


def test_one_writer_for_several_checkpoints(tmp_path: Path) -> None:
    writer, reader = GuardedWriter(tmp_path / "first"), GuardedReader(tmp_path / "first")
    metadata = {}
    for number, name in enumerate(["a", "b", None]):
        checkpoint_id = None if name is None else tmp_path / name
        metadata[name] = dcp.save(state(number), checkpoint_id=checkpoint_id, storage_writer=writer)
    assert names(tmp_path) == ["a", "b", "first"]
    for number, name in enumerate(["a", "b", "first"]):
        target = state(-1)
        dcp.load(target, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert_same(target, state(number))
        assert metadata[None if name == "first" else name].storage_meta.checkpoint_id == str(tmp_path / name)
    assert len({one.storage_meta.save_id for one in metadata.values()}) == 3


def test_plan_caching_stores_the_values_of_each_save(tmp_path: Path) -> None:
    class Caching(DefaultSavePlanner):
        """A cache of its own: they are kept by the planner's class name."""

    live = {"model": state()["model"], "optim": adam().state_dict()}
    for number in range(3):
        for tensor in (live["model"]["w"], live["optim"]["state"][0]["step"]):
            tensor.add_(1)
        live["optim"]["param_groups"][0]["lr"] = float(number)
        planner, path = Caching(enable_plan_caching=True), tmp_path / str(number)
        metadata = dcp.save(live, storage_writer=GuardedWriter(path), planner=planner)
        target = blank(live)
        dcp.load(target, storage_reader=GuardedReader(path))
        assert_same(target["model"], live["model"])
        assert_same(target["optim"]["param_groups"], live["optim"]["param_groups"])
        assert verify(path).ok  # certificates are those of this save's step
        assert metadata.storage_meta.checkpoint_id == str(path)
        assert metadata.state_dict_metadata == GuardedReader(path).read_metadata().state_dict_metadata


def test_plan_cached_by_the_stock_writer_is_coded_too(tmp_path: Path) -> None:
    class Shared(DefaultSavePlanner):
        pass

    live = {"optim": adam().state_dict()}
    dcp.save(live, storage_writer=FileSystemWriter(tmp_path / "stock"), planner=Shared(enable_plan_caching=True))
    writer = GuardedWriter(tmp_path / "ours")
    metadata = dcp.save(live, storage_writer=writer, planner=Shared(enable_plan_caching=True))
    assert metadata.guard_report.moments.coordinates == 1800
    assert verify(tmp_path / "ours").ok


def test_dtype_that_changed_behind_a_cached_plan_is_refused(tmp_path: Path) -> None:
    class Blind(DefaultSavePlanner):
        pass

    live = adam().state_dict()
    dcp.save(live, storage_writer=GuardedWriter(tmp_path / "a"), planner=Blind(enable_plan_caching=True))
    live["state"][0]["exp_avg_sq"] = live["state"][0]["exp_avg_sq"].bfloat16()
    writer = GuardedWriter(tmp_path / "b")
    error = failure(dcp.save, live, storage_writer=writer, planner=Blind(enable_plan_caching=True))
    assert str(error).startswith("rank 0, state.0.exp_avg_sq: the tensor is not the one that was planned; expected")
    assert "expected torch.float32 (40, 40); got torch.bfloat16 (40, 40)" in str(error)
    assert "enable_plan_caching=False" in str(error)
    assert names(tmp_path / "b") == []
    dcp.save(live, storage_writer=writer, planner=Blind())  # what the message advises
    assert verify(tmp_path / "b").ok


def test_planner_with_nothing_but_its_interface(tmp_path: Path) -> None:
    live = {"optim": adam().state_dict(), "epoch": 3}
    metadata = dcp.save(live, storage_writer=GuardedWriter(tmp_path / "ck"), planner=BarePlanner())
    assert metadata.guard_report.moments.coordinates == 1800
    target = blank(live)
    dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck"))
    assert_same(target["optim"]["param_groups"], live["optim"]["param_groups"])
    assert verify(tmp_path / "ck").ok


def test_planner_data_without_a_plain_form_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data["epoch"] = range(3)
            return plans, metadata

    error = failure(dcp.save, state(), storage_writer=GuardedWriter(tmp_path / "ck"), planner=Odd())
    assert "planner_data: the planner's data have no plain form" in str(error)
    assert "['epoch']" in str(error)
    assert names(tmp_path / "ck") == []


def test_planner_that_reads_its_own_bytes(tmp_path: Path) -> None:
    class Raw(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            data.seek(0)
            return type(data)(b"mine" + data.read()) if not isinstance(data, torch.Tensor) else data

    class Unraw(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            assert value.read(4) == b"mine"
            super().load_bytes(read_item, type(value)(value.read()))

    dcp.save({"epoch": 3}, storage_writer=GuardedWriter(tmp_path / "ck"), planner=Raw())
    target = {"epoch": 0}
    dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck", allow_pickle=True), planner=Unraw())
    assert target == {"epoch": 3}


def test_scratch_memory_of_a_planner_is_committed(tmp_path: Path) -> None:
    class Scratch(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return super().resolve_tensor(read_item).double()

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor)

    live = {"optim": adam().state_dict(), "w": torch.randn(70, 70)}
    dcp.save(live, storage_writer=GuardedWriter(tmp_path / "ck", Guard(codec="exact")))
    target = blank(live)
    dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck"), planner=Scratch())
    assert_same(target, live)


def test_flat_state_dicts_stay_flat(tmp_path: Path) -> None:
    live = {"w": torch.randn(70, 70), "conf": {"lr": 0.1}}
    writer, planner = GuardedWriter(tmp_path / "ck"), DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(live, storage_writer=writer, planner=planner)
    target = {"w": torch.zeros(70, 70), "conf": None}
    # With flatten_sharded_tensors torch loads values into a copy of the dict.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck"), planner=planner)
    assert_same(target, live)


# ---- targets


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float64),
        (torch.int32, torch.int64), (torch.uint8, torch.int16), (torch.complex64, torch.complex128),
    ],
)  # fmt: skip
def test_widening_is_allowed(tmp_path: Path, stored: torch.dtype, target: torch.dtype) -> None:
    values = torch.arange(120).to(stored)
    loaded, _ = round_trip({"x": values}, tmp_path / "ck", target={"x": torch.zeros(120, dtype=target)})
    assert_same(loaded["x"], values.to(target))


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float16, torch.bfloat16),
        (torch.int64, torch.int32), (torch.int64, torch.float64), (torch.float32, torch.int64),
        (torch.int8, torch.uint8), (torch.bool, torch.uint8), (torch.complex64, torch.float32),
    ],
)  # fmt: skip
def test_narrowing_is_refused_before_anything_is_restored(
    tmp_path: Path, stored: torch.dtype, target: torch.dtype
) -> None:
    dcp.save({"a": torch.ones(9), "x": torch.zeros(9, dtype=stored)}, storage_writer=GuardedWriter(tmp_path / "ck"))
    loaded = {"a": torch.zeros(9), "x": torch.zeros(9, dtype=target)}
    error = failure(dcp.load, loaded, storage_reader=GuardedReader(tmp_path / "ck"))
    assert type(error) is GuardError
    expected, got = (str(dtype).removeprefix("torch.") for dtype in (stored, target))
    assert f"x: the target's dtype cannot hold the stored values; expected {expected}; got {got}. Load" in str(error)
    assert not loaded["a"].any()


def test_moments_widen_too(tmp_path: Path) -> None:
    live, target = adam().state_dict(), blank(adam().state_dict())
    for entry in target["state"].values():
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg"].double(), entry["exp_avg_sq"].double()
    loaded, _ = round_trip(live, tmp_path / "ck", target=target)
    again, _ = round_trip(live, tmp_path / "again")
    assert_same(loaded["state"][0]["exp_avg"], again["state"][0]["exp_avg"].double())


def test_one_moment_may_be_loaded_without_the_other(tmp_path: Path) -> None:
    live = adam().state_dict()
    both, _ = round_trip(live, tmp_path / "ck")
    for name in ("exp_avg", "exp_avg_sq"):
        target = {"state": {"0": {name: torch.zeros(40, 40)}}}
        dcp.load(target, storage_reader=GuardedReader(tmp_path / "ck"))
        assert_same(target["state"]["0"][name], both["state"][0][name])


def test_keys_and_shapes_are_checked_by_the_planner(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=GuardedWriter(tmp_path / "ck"))
    reader = GuardedReader(tmp_path / "ck")
    target = {"model": {"w": torch.zeros(70, 70), "new": torch.zeros(3)}}
    assert "Missing key in checkpoint state_dict: model.new" in str(failure(dcp.load, target, storage_reader=reader))
    dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(target["model"]["w"], state()["model"]["w"])
    error = failure(dcp.load, {"model": {"w": torch.zeros(70, 71)}}, storage_reader=reader)
    assert "Size mismatch between saved torch.Size([70, 70])" in str(error)


# ---- whole loads and strangers


def test_a_whole_checkpoint_without_a_template(tmp_path: Path) -> None:
    live = {"optim": {"state": {"0": adam().state_dict()["state"][0]}, "lr": 0.1}, "rng": torch.get_rng_state()}
    saved, _ = round_trip(live, tmp_path / "ck")
    found: dict[str, Any] = {}
    reader, planner = GuardedReader(tmp_path / "ck"), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    assert_same(found, saved)
    only = _load_state_dict_from_keys("optim.lr", storage_reader=reader)
    assert only == {"optim": {"lr": 0.1}}


def test_the_stock_reader_stops_at_the_first_byte(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=GuardedWriter(tmp_path / "ck"))
    error = failure(dcp.load, state(), storage_reader=FileSystemReader(tmp_path / "ck"))
    assert "invalid load key" in str(error)


def test_a_stock_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "ck"))
    error = failure(dcp.load, state(), storage_reader=GuardedReader(tmp_path / "ck"))
    assert type(error) is FormatError
    assert "not a guarddcp manifest" in str(error)
    assert "read by torch.distributed.checkpoint.FileSystemReader" in str(error)


def test_returned_metadata_is_what_a_reader_finds(tmp_path: Path) -> None:
    live = {"optim": adam().state_dict(), "model": state()["model"], "values": {"a": 1, "b": (2, None)}}
    metadata = dcp.save(live, storage_writer=GuardedWriter(tmp_path / "ck"))
    found = GuardedReader(tmp_path / "ck").read_metadata()
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert list(found.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert found.planner_data == metadata.planner_data
    assert found.storage_meta == metadata.storage_meta
    assert isinstance(found.state_dict_metadata["optim.state.0.exp_avg_sq"], TensorStorageMetadata)


# ---- objects


def test_pickled_writers_and_readers_work(tmp_path: Path) -> None:
    writer = GuardedWriter(tmp_path / "a", Guard(tolerance=0.05), optimizer=adam(), overwrite=True, threads=1)
    dcp.save(state(), storage_writer=writer)
    writer = pickle.loads(pickle.dumps(writer))
    dcp.save(state(2), storage_writer=writer)
    reader = GuardedReader(tmp_path / "a", verify="before")
    dcp.load(state(0), storage_reader=reader)
    target = state(0)
    dcp.load(target, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert_same(target, state(2))


def test_illegal_arguments_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        GuardedWriter(tmp_path, threads=0)
    with pytest.raises(ValueError, match="verify must be 'full', 'before' or 'checksum', not 'none'"):
        GuardedReader(tmp_path, verify="none")
