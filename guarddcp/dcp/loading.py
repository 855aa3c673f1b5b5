"""One rank's share of a load: requests to boxes, frames to targets (the body of read_data).

prove      certificates of every shard that the plan reads, from their constants
check_all  (verify="before") every byte that will be needed, before any target changes
load       values; tensors in packs; shards: frames decoded straight into the target where it lies right
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from guarddcp.certificate import Certificate, prove
from guarddcp.codecs.view import Box, Layout, intersect
from guarddcp.container.manifest import Manifest
from guarddcp.container.records import IN_PACK, PACKED, PICKLED, TREE, ShardRecord, ValueRecord
from guarddcp.container.value_types import DTYPES
from guarddcp.container.values import decode_value
from guarddcp.dcp.fetching import Fetcher, FrameJob, OpenShard
from guarddcp.dcp.subclasses import check_tree, restore_tree
from guarddcp.dcp.tensors import dtype_name, tensor_of_bytes
from guarddcp.errors import FormatError, GuardError, IntegrityError, ToleranceError

__all__ = ["RankLoad", "prove_all", "scratch", "widens"]


def prove_all(certificates: dict[Certificate, str]) -> None:
    """Recompute each certificate; ``certificates``: one name of a shard under each, for the message."""
    for certificate, where in certificates.items():
        try:
            prove(certificate)
        except (ToleranceError, FormatError) as error:
            raise type(error)(
                str(error), where=where, hint="Nothing was restored: the moments under this certificate are not proved"
            ) from error


def widens(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``stored`` is one of ``target``, of the same kind."""
    if stored == target:
        return True
    kinds = (stored.is_floating_point, stored.is_complex) == (target.is_floating_point, target.is_complex)
    if not kinds or target.itemsize <= stored.itemsize or torch.bool in (stored, target):
        return False
    if stored.is_floating_point or stored.is_complex:
        return target in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return torch.iinfo(target).min <= torch.iinfo(stored).min and torch.iinfo(stored).max <= torch.iinfo(target).max


@dataclass
class _Target:
    """One request: ``box`` of the shard goes into ``tensor``, whose shape is the box's."""

    role: str
    box: Box
    tensor: torch.Tensor


@dataclass
class _Wanted:
    shard: OpenShard
    targets: list[_Target] = field(default_factory=list)


class RankLoad:
    """Serves the read items of one rank."""

    def __init__(self, manifest: Manifest, fetcher: Fetcher, *, allow_pickle: bool) -> None:
        self._manifest, self._fetcher, self._allow_pickle = manifest, fetcher, allow_pickle
        self._packs: dict[int, np.ndarray] = {}
        self._unpickled: dict[int, torch.Tensor] = {}

    def prove(self, plan: LoadPlan) -> int:
        """Prove every certificate the plan needs; returns how many there were."""
        certificates: dict[Certificate, str] = {}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                record = self._manifest.shard(self._shard_index(item))
                if record.certificate is not None:
                    certificates.setdefault(record.certificate, item.storage_index.fqn)
        prove_all(certificates)
        return len(certificates)

    def check_all(self, plan: LoadPlan) -> None:
        """Fetch and check every byte the plan needs; no target is touched."""
        boxes: dict[int, list[Box]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._pack(self._value_record(item).pack)
            else:
                boxes[self._shard_index(item)].append(_box_of(item))
        for index in boxes:
            if self._manifest.shard(index).codec in IN_PACK:
                self._pack(self._manifest.shard(index).pack)
        shards = self._open([index for index in boxes if self._manifest.shard(index).codec not in IN_PACK])
        wanted = [(shard, boxes[index]) for index, shard in shards.items()]
        self._fetcher.run(wanted, scratch, lambda job, arrays: None)

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> list[ShardRecord]:
        """Restore every item; returns the shards that were read."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [(item, planner.resolve_tensor(item)) for item in tensors]
        for item, target in targets:  # every target is judged, every value parsed, before any target is changed
            self._check_dtype(item, target)
            self._check_whole(item, target)
        values = [(item, self._value(item)) for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item, buffer in values:
            planner.load_bytes(item, buffer)
        read = self._load_tensors(targets)
        for item, target in targets:
            planner.commit_tensor(item, target)
        return read

    # -- tensors -------------------------------------------------------------------------------------------------

    def _shard_index(self, item: ReadItem) -> int:
        return self._manifest.find(item.storage_index.fqn, tuple(item.storage_index.offset or ()))

    def _check_dtype(self, item: ReadItem, target: torch.Tensor) -> None:
        key = item.storage_index.fqn
        stored = DTYPES[self._manifest.tensors[key].dtype]
        if not widens(stored, target.dtype):
            raise GuardError(
                "the target's dtype cannot hold the stored values",
                where=key,
                expected=dtype_name(stored),
                got=dtype_name(target.dtype),
                hint="Load into a tensor of the stored dtype and convert it yourself",
            )

    def _check_whole(self, item: ReadItem, target: torch.Tensor) -> None:
        """Of a tensor subclass, or a tensor stored as pickle, only whole chunks can be restored, of the right kind."""
        index, key = self._shard_index(item), item.storage_index.fqn
        if self._manifest.columns["codec"][index] not in (TREE, PICKLED):
            return
        record = self._manifest.shard(index)
        if tuple(item.lengths) != record.sizes:
            raise GuardError(
                "a tensor subclass or pickled tensor can only be restored as the whole chunk that was saved",
                where=key,
                expected=f"sizes {record.sizes}",
                got=f"sizes {tuple(item.lengths)}",
                hint="Restore on the mesh that saved it",
            )
        raw = self._slice(record.pack, record.pack_begin, record.bytes)
        if record.codec == TREE:
            check_tree(raw, target, where=key)
        else:
            self._unpickled[index] = found = self._unpickle(raw, key)
            if not isinstance(found, torch.Tensor) or found.shape != target.shape:
                raise GuardError(
                    "not the tensor that the manifest describes",
                    where=key,
                    expected=f"a tensor of sizes {tuple(target.shape)}",
                    got=f"{type(found).__name__} of sizes {tuple(getattr(found, 'shape', ()))}",
                )

    def _open(self, indexes: list[int]) -> dict[int, OpenShard]:
        self._fetcher.open_files(int(self._manifest.columns["file"][index]) for index in indexes)
        return {index: self._fetcher.open_shard(index) for index in indexes}

    def _load_tensors(self, targets: list[tuple[ReadItem, torch.Tensor]]) -> list[ShardRecord]:
        by_shard: dict[int, list[tuple[ReadItem, torch.Tensor]]] = defaultdict(list)
        for item, target in targets:
            by_shard[self._shard_index(item)].append((item, target))
        records = {index: self._manifest.shard(index) for index in by_shard}
        for index, record in records.items():
            if record.codec in IN_PACK:
                for item, target in by_shard[index]:
                    self._load_packed(index, record, item, target)
        shards = self._open([index for index, record in records.items() if record.codec not in IN_PACK])
        wanted = {index: _Wanted(shard) for index, shard in shards.items()}
        for index, one in wanted.items():
            roles = {key: role for role, key in one.shard.record.members}
            one.targets = [
                _Target(roles[item.storage_index.fqn], _box_of(item), target) for item, target in by_shard[index]
            ]
        self._fetcher.run(
            [(one.shard, [target.box for target in one.targets]) for one in wanted.values()],
            lambda job: _prepare(job, wanted[job.shard.index]),
            lambda job, arrays: _deliver(job, wanted[job.shard.index], arrays, self._manifest),
        )
        return list(records.values())

    def _load_packed(self, index: int, record: ShardRecord, item: ReadItem, target: torch.Tensor) -> None:
        key, raw = item.storage_index.fqn, self._slice(record.pack, record.pack_begin, record.bytes)
        if record.codec == PACKED:
            dtype = DTYPES[self._manifest.tensors[key].dtype]
            if len(raw) != record.coordinates * dtype.itemsize:
                raise FormatError("packed tensor of another size", where=key, got=len(raw))
            box = tuple(slice(begin, end) for begin, end in _box_of(item))
            target.detach().copy_(tensor_of_bytes(raw, dtype).reshape(record.sizes)[box])
        elif record.codec == TREE:
            restore_tree(raw, target, where=key)
        else:
            with torch.no_grad():  # detach() would do for dense tensors; a sparse one would keep its old elements
                target.copy_(self._unpickled[index])

    # -- values --------------------------------------------------------------------------------------------------

    def _value_record(self, item: ReadItem) -> ValueRecord:
        key = item.storage_index.fqn
        try:
            return self._manifest.values[key]
        except KeyError:
            raise FormatError("no such value in the manifest", where=key) from None

    def _value(self, item: ReadItem) -> io.BytesIO:
        """What the planner unpickles: bytes made here and now, never stored ones (unless those are trusted)."""
        record = self._value_record(item)
        raw = self._slice(record.pack, record.begin, record.length)
        if record.kind == "pickle" and self._allow_pickle:
            return io.BytesIO(raw)  # a planner of the user's may have made them in a way of its own
        buffer = io.BytesIO()
        torch.save(decode_value(raw) if record.kind == "plain" else self._unpickle(raw, record.key), buffer)
        buffer.seek(0)
        return buffer

    def _unpickle(self, raw: bytes, key: str) -> Any:
        try:
            return torch.load(io.BytesIO(raw), weights_only=True)
        except Exception as error:
            if self._allow_pickle:
                return torch.load(io.BytesIO(raw), weights_only=False)
            raise GuardError(
                f"stored as pickle, and torch's safe unpickler refuses it ({_refusal(error)})",
                where=key,
                hint="Pass allow_pickle=True to GuardedReader if you trust whoever wrote this checkpoint",
            ) from error

    def _pack(self, index: int) -> np.ndarray:
        if index not in self._packs:
            self._packs[index] = self._fetcher.read_pack(index)
        return self._packs[index]

    def _slice(self, pack: int, begin: int, length: int) -> bytes:
        raw = self._pack(pack)
        if begin + length > raw.size:
            raise IntegrityError("a packed item lies outside its pack", where=f"pack {pack}", got=(begin, length))
        return raw[begin : begin + length].tobytes()


def _refusal(error: Exception) -> str:
    """The line of torch's message that says what was refused, without its advice."""
    text = str(error)
    at = text.find("Unsupported ")
    return (text[at:] if at >= 0 else f"{type(error).__name__}: {text}").splitlines()[0].split(". ")[0][:200]


def _box_of(item: ReadItem) -> Box:
    return tuple((int(o), int(o) + int(n)) for o, n in zip(item.storage_offsets, item.lengths, strict=True))


def scratch(job: FrameJob) -> dict[str, np.ndarray]:
    """Fresh arrays for a frame that is only checked."""
    frame = job.shard.layout.frame(job.number)
    if job.shard.predictor is None:
        return {}
    m, v = np.empty((2, frame.rows, frame.columns), np.float32)
    return {"m": m, "v": v}


def _prepare(job: FrameJob, wanted: _Wanted) -> dict[str, np.ndarray]:
    """Arrays to decode into: the target's own memory where a frame falls into it whole and in order."""
    if job.shard.predictor is None:
        return {}
    frame = job.shard.layout.frame(job.number)
    arrays = {}
    for role in ("m", "v"):
        at = [target for target in wanted.targets if target.role == role]
        direct = _direct(job, at[0]) if len(at) == 1 else None
        arrays[role] = direct if direct is not None else np.empty((frame.rows, frame.columns), np.float32)
    return arrays


def _direct(job: FrameJob, target: _Target) -> np.ndarray | None:
    layout = job.shard.layout
    frame = layout.frame(job.number)
    pieces = layout.pieces(job.number)
    if target.tensor.dtype != torch.float32 or target.tensor.device.type != "cpu" or len(pieces) != 1:
        return None
    box = tuple(target.box[axis] for axis in layout.view.axes)
    if intersect(pieces[0][1], box) != pieces[0][1]:
        return None
    place = _place(target, layout, pieces[0][1])
    if type(place) is not torch.Tensor or not place.is_contiguous():
        return None
    return place.numpy().reshape(frame.rows, frame.columns)


def _place(target: _Target, layout: Layout, box: Box) -> torch.Tensor:
    """The part of the target, axes in flat order, that holds ``box`` of the permuted chunk."""
    permuted = target.tensor.detach().permute(layout.view.axes)
    origin = [target.box[axis][0] for axis in layout.view.axes]
    return permuted[tuple(slice(begin - o, end - o) for (begin, end), o in zip(box, origin, strict=True))]


def _deliver(job: FrameJob, wanted: _Wanted, arrays: dict[str, np.ndarray], manifest: Manifest) -> None:
    layout = job.shard.layout
    for target in wanted.targets:
        array = arrays[target.role]
        if target.role == "x":
            dtype = DTYPES[manifest.tensors[job.shard.record.members[0][1]].dtype]
            flat = torch.from_numpy(array).view(dtype)
        else:
            flat = torch.from_numpy(array.reshape(-1))
        box = tuple(target.box[axis] for axis in layout.view.axes)
        for at, piece in layout.pieces(job.number):
            common = intersect(piece, box)
            if common is None:
                continue
            sizes = [end - begin for begin, end in piece]
            source = flat[at : at + int(np.prod(sizes, dtype=np.int64))].view(sizes)
            source = source[tuple(slice(b - o, e - o) for (b, e), (o, _) in zip(common, piece, strict=True))]
            place = _place(target, layout, common)
            if place.data_ptr() != source.data_ptr():
                place.copy_(source)
