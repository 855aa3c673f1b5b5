"""Tensor subclasses: by their inner tensors where they say them, else as pickle, said aloud and refused by default."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failure, round_trip, said
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.utils._python_dispatch import return_and_correct_aliasing

from guarddcp import GuardedReader, GuardedWriter, verify
from guarddcp.errors import GuardError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Scaled(torch.Tensor):
    """An 8-bit tensor with one scale per row and a sign flag, as low-bit optimizers keep their states."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: Any = True) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: Any = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any = None, stride: Any = None) -> Scaled:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            new = cls(args[0].codes.detach(), args[0].scale.detach(), args[0].signed)
            return return_and_correct_aliasing(func, args, kwargs or {}, new)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func} on a quantised tensor")


class Other(Scaled):
    pass


class Marked(torch.Tensor):
    """A subclass that says nothing about its inside."""


def scaled(
    rows: int = 20, columns: int = 30, *, fill: int | None = None, kind: type = Scaled, signed: Any = True
) -> Any:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, generator=generator)
    return kind(codes, scale, signed) if fill is None else kind(codes.fill_(fill), scale.fill_(fill), signed)


@pytest.mark.parametrize("rows", [0, 20, 900])
def test_inner_tensors_come_back_into_the_target(tmp_path: Path, rows: int) -> None:
    state, target = scaled(rows), scaled(rows, fill=0)
    codes, scale = target.codes, target.scale
    loaded, _ = round_trip({"x": state}, tmp_path / "ck", target={"x": target})
    assert loaded["x"].codes is codes
    assert_same(codes, state.codes)
    assert_same(scale, state.scale)
    assert verify(tmp_path / "ck").ok


def test_a_subclass_inside_a_subclass(tmp_path: Path) -> None:
    state, target = scaled(kind=Scaled), scaled(fill=0)
    state.scale, target.scale = scaled(1, 20), scaled(1, 20, fill=0)
    round_trip({"x": state}, tmp_path / "ck", target={"x": target})
    assert_same(target.codes, state.codes)
    assert_same(target.scale.codes, state.scale.codes)


def saved(path: Path, tensor: Any) -> Path:
    dcp.save({"a": {"x": tensor}, "w": torch.ones(9)}, storage_writer=GuardedWriter(path))
    return path


def refused(path: Path, target: Any, **reader: Any) -> str:
    """The message of the refusal; nothing else may have been restored."""
    state = {"a": {"x": target}, "w": torch.zeros(9)}
    error = failure(dcp.load, state, storage_reader=GuardedReader(path, **reader))
    assert type(error) is GuardError
    assert_same(state["w"], torch.zeros(9))
    return str(error)


@pytest.mark.parametrize("verify_level", ["full", "before", "checksum"])
def test_another_class_is_refused(tmp_path: Path, verify_level: str) -> None:
    path = saved(tmp_path / "ck", scaled())
    for target, name in ((scaled(kind=Other, fill=0), "Other"), (torch.zeros(20, 30), "torch.Tensor")):
        text = refused(path, target, verify=verify_level)
        assert text.startswith("a.x: tensor subclasses are restored into a target of their own class; expected")
        assert "Scaled with ['codes', 'scale']" in text.partition("; got ")[0]
        assert name in text.partition("; got ")[2]
        assert not getattr(target, "codes", target).any()


def test_inner_tensors_of_another_shape_or_dtype_are_refused(tmp_path: Path) -> None:
    path, target = saved(tmp_path / "ck", scaled()), scaled(fill=0)
    target.scale = torch.zeros(20, dtype=torch.float64)
    text = refused(path, target)
    assert text == "a.x.scale: inner tensor differs; expected torch.float32 (20,); got torch.float64 (20,)"
    assert not target.codes.any()  # the other inner tensor was not restored either


def test_a_target_that_means_something_else_by_its_codes_is_refused(tmp_path: Path) -> None:
    path, target = saved(tmp_path / "ck", scaled(signed=True)), scaled(signed=False, fill=0)
    text = refused(path, target)
    assert "Scaled that describes itself differently; expected" in text
    assert not target.codes.any()


def test_what_a_subclass_says_of_itself_may_have_no_plain_form(tmp_path: Path) -> None:
    state, target = scaled(signed=range(3)), scaled(signed=range(3), fill=0)
    round_trip({"x": state}, tmp_path / "ck", target={"x": target})
    assert_same(target.codes, state.codes)


class HalfPlanner(DefaultLoadPlanner):
    """Asks for the upper half of every tensor, as a load on two ranks would."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        halves = [dataclasses.replace(i, lengths=torch.Size((i.lengths[0] // 2, *i.lengths[1:]))) for i in plan.items]
        return dataclasses.replace(plan, items=halves)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.lookup_tensor(read_item.dest_index)


def test_a_part_of_a_subclass_is_refused(tmp_path: Path) -> None:
    path, target = saved(tmp_path / "ck", scaled()), scaled(fill=0)
    error = failure(dcp.load, {"a": {"x": target}}, storage_reader=GuardedReader(path), planner=HalfPlanner())
    assert str(error).startswith("a.x: a tensor subclass or pickled tensor can only be restored as the whole chunk")
    assert "expected sizes (20, 30); got sizes (10, 30). Restore on the mesh that saved it" in str(error)
    assert not target.codes.any()


def test_subclasses_as_moments_are_stored_exactly_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, target = adam(shapes=((20, 30),)).state_dict(), blank(adam(shapes=((20, 30),)).state_dict())
    for tree, fill in ((state, None), (target, 0)):
        tree["state"][0]["exp_avg"] = scaled(fill=fill)
    loaded, report = round_trip(state, tmp_path / "ck", target=target)
    assert_same(loaded["state"][0]["exp_avg"].codes, state["state"][0]["exp_avg"].codes)
    assert_same(loaded["state"][0]["exp_avg_sq"], state["state"][0]["exp_avg_sq"])
    assert report.moments.coordinates == 0
    (line,) = said(caplog)
    assert "tensor-type: stored exactly: a moment is not a plain tensor [state.0.exp_avg]" in line


def test_a_subclass_that_hides_its_inside_is_pickled_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "ck", torch.arange(6.0).as_subclass(Marked))
    (line,) = said(caplog)
    assert line.startswith(f"{path}: pickle: stored as pickle")
    assert "[a.x]" in line
    text = refused(path, torch.zeros(6).as_subclass(Marked))
    assert text.startswith("a.x: stored as pickle, and torch's safe unpickler refuses it (Unsupported ")
    assert "Marked" in text
    target = {"a": {"x": torch.zeros(6).as_subclass(Marked)}}
    dcp.load(target, storage_reader=GuardedReader(path, allow_pickle=True))
    assert type(target["a"]["x"]) is Marked
    assert target["a"]["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_classes_that_the_safe_unpickler_was_told_of_need_no_permission(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", torch.arange(6.0).as_subclass(Marked))
    target = {"a": {"x": torch.zeros(6).as_subclass(Marked)}}
    with torch.serialization.safe_globals([Marked]):
        dcp.load(target, storage_reader=GuardedReader(path))
    assert target["a"]["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
