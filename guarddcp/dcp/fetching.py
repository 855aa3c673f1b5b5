"""From shards to frames to bytes to moments: what a load and a verification share.

open        footers of the data files involved, held against the manifest
jobs        shard + boxes -> the frames they overlap
run         batches: ranges fetched together -> checksum, decode, range, digest on threads -> deliver
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from guarddcp.codecs import ratio
from guarddcp.codecs.planes import decode_exact, exact_raw_bytes
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.view import Box, Layout
from guarddcp.container.datafile import Footer, open_block
from guarddcp.container.layout import HEADER_BYTES
from guarddcp.container.manifest import Manifest
from guarddcp.container.records import RATIO, ShardRecord
from guarddcp.container.value_types import DTYPES
from guarddcp.dcp.pipeline import OrderedPool
from guarddcp.errors import FormatError, IntegrityError
from guarddcp.kernels.params import CoderParams
from guarddcp.storage.store import Store

__all__ = ["Fetcher", "FrameJob", "OpenShard"]

_BATCH_BYTES = 16 << 20
"""Stored bytes fetched at a time; with the frames in decoding they bound a load's memory."""


@dataclass
class OpenShard:
    """A shard that is being read: its layout, and once its side data are here, its predictor."""

    index: int
    record: ShardRecord
    layout: Layout
    item_bytes: int
    private: ratio.Private | None = None
    params: CoderParams | None = None
    predictor: RowCol | None = None

    @cached_property
    def where(self) -> str:
        return f"{self.record.members[0][1]} at {self.record.offsets}"


@dataclass
class FrameJob:
    """One frame to decode. ``arrays``: where to decode it (role -> float32 (rows, columns)), filled by the receiver."""

    shard: OpenShard
    number: int

    @property
    def where(self) -> str:
        return f"{self.shard.where} frame {self.number}"


Prepare = Callable[[FrameJob], dict[str, np.ndarray]]
Deliver = Callable[[FrameJob, dict[str, np.ndarray]], None]


class Fetcher:
    """Reads shards and packs of one manifest from a store; every byte is checked before it is handed out."""

    def __init__(self, manifest: Manifest, store: Store, pool: OrderedPool, *, digest: bool = True) -> None:
        self._manifest, self._store, self._pool, self._digest = manifest, store, pool, digest
        self._footers: dict[int, Footer] = {}
        self._ranges = manifest.record_begins()

    def open_files(self, files: Iterable[int]) -> None:
        """Fetch and check header and footer of the files that are not open yet."""
        wanted = sorted(set(files) - set(self._footers))
        entries = [self._manifest.files[number] for number in wanted]
        for entry in entries if self._store.is_local else ():
            # Elsewhere a size costs a request, and objects do not grow: what replaces one fails the trailer.
            if (size := self._store.size(entry.name)) != entry.size:
                raise IntegrityError(
                    "data file of another size", where=self._store.where(entry.name), expected=entry.size, got=size
                )
        heads = [(entry.name, 0, HEADER_BYTES) for entry in entries]
        tails = [(entry.name, entry.footer_begin, entry.size) for entry in entries]
        data = self._store.read_ranges(heads + tails)
        for i, (number, entry) in enumerate(zip(wanted, entries, strict=True)):
            self._footers[number] = Footer.parse(entry, data[i], data[len(wanted) + i])

    def open_shard(self, index: int) -> OpenShard:
        """Parse a shard's private part and hold its record against the footer; nothing of it is fetched yet."""
        record = self._manifest.shard(index)
        assert record.view is not None
        where = f"{record.members[0][1]} at {record.offsets}"
        item_bytes = DTYPES[self._manifest.tensors[record.members[0][1]].dtype].itemsize
        if record.codec == RATIO:
            assert record.certificate is not None
            private = ratio.Private.from_bytes(record.private, where=where)
            layout = Layout(record.sizes, record.view, private.frame_coordinates)
            shard = OpenShard(index, record, layout, item_bytes, private, ratio.params_of(record.certificate))
        else:
            if len(record.private) != 4:
                raise FormatError("codec-private part", where=where, expected="4 bytes", got=record.private.hex())
            (frame_coordinates,) = struct.unpack("<I", record.private)
            if not 1 <= frame_coordinates * item_bytes <= 1 << 26:
                raise FormatError("frame size", where=where, expected="1 .. 2^26 bytes", got=frame_coordinates)
            shard = OpenShard(index, record, Layout(record.sizes, record.view, frame_coordinates), item_bytes)
        self._check_record(record.file, record.record, 1 + shard.layout.num_frames, where)
        return shard

    def _check_record(self, file: int, record: int, num_blocks: int, where: str) -> None:
        footer = self._footers[file]
        name = f"{footer.entry.name}, {where}"
        if record >= footer.records or footer.num_blocks(record) != num_blocks:
            raise FormatError("number of blocks in the footer", where=name, expected=num_blocks)
        begin, _ = footer.block_range(record, 0)
        _, end = footer.block_range(record, num_blocks - 1)
        if (begin, end) != self._ranges[file, record]:
            raise FormatError(
                "footer and manifest place a record differently",
                where=name,
                expected=self._ranges[file, record],
                got=(begin, end),
            )

    def read_pack(self, index: int) -> np.ndarray:
        """Raw bytes of a pack, uint8."""
        pack = self._manifest.packs[index]
        where = f"pack {index}"
        self.open_files([pack.file])
        self._check_record(pack.file, pack.record, 1, where)
        payload = self._blocks([(pack.file, pack.record, 0, where)])[0]
        if exact_raw_bytes(payload, where=where) != pack.raw:
            raise FormatError("pack of another size", where=where, expected=pack.raw)
        return decode_exact(payload, pack.raw, where=where)

    def _blocks(self, places: list[tuple[int, int, int, str]]) -> list[memoryview]:
        ranges = [(self._footers[f].entry.name, *self._footers[f].block_range(r, b)) for f, r, b, _ in places]
        data = self._store.read_ranges(ranges)
        return [
            open_block(self._footers[f].entry, r, b, block, where=where)
            for (f, r, b, where), block in zip(places, data, strict=True)
        ]

    def run(self, wanted: list[tuple[OpenShard, list[Box]]], prepare: Prepare, deliver: Deliver) -> None:
        """Decode every frame that overlaps a box of its shard.

        On the pool's threads, per frame: ``prepare(job)`` gives the arrays to decode into, ``deliver(job, arrays)``
        gets them back, checked. Roles: m and v float32 (rows, columns); x: uint8 of the frame's bytes.
        """
        self._read_sides([shard for shard, _ in wanted])
        for batch in self._batches(wanted):
            places = [(j.shard.record.file, j.shard.record.record, 1 + j.number) for j in batch]
            ranges = [(self._footers[f].entry.name, *self._footers[f].block_range(r, b)) for f, r, b in places]
            for job, data in zip(batch, self._store.read_ranges(ranges), strict=True):
                self._pool.submit(partial(self._decode, job, data, prepare, deliver), lambda _: None)
        self._pool.drain()

    def _read_sides(self, shards: list[OpenShard]) -> None:
        places = [(s.record.file, s.record.record, 0, f"{s.where} side data") for s in shards]
        for shard, side in zip(shards, self._blocks(places), strict=True):
            if shard.private is not None:
                shard.predictor = ratio.decode_side(shard.private, side, shard.layout, where=shard.where)
            elif len(side):
                raise FormatError("side data of an exact shard", where=shard.where, expected="none", got=len(side))

    def _batches(self, wanted: list[tuple[OpenShard, list[Box]]]) -> Iterator[list[FrameJob]]:
        batch: list[FrameJob] = []
        size = 0
        for shard, boxes in wanted:
            numbers = sorted({number for box in boxes for number in shard.layout.frames_of_box(box)})
            footer = self._footers[shard.record.file]
            for number in numbers:
                begin, end = footer.block_range(shard.record.record, 1 + number)
                if batch and size + end - begin > _BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append(FrameJob(shard, number))
                size += end - begin
        if batch:
            yield batch

    def _decode(self, job: FrameJob, data: bytes, prepare: Prepare, deliver: Deliver) -> None:
        shard, frame = job.shard, job.shard.layout.frame(job.number)
        entry = self._footers[shard.record.file].entry
        payload = open_block(entry, shard.record.record, 1 + job.number, data, where=job.where)
        arrays = prepare(job)
        if shard.predictor is None:
            length = (frame.end - frame.begin) * shard.item_bytes
            arrays["x"] = decode_exact(payload, length, where=job.where)
        else:
            assert shard.params is not None
            terms = shard.predictor.terms(frame)
            ratio.decode_frame(
                payload, frame, terms, shard.params, arrays["m"], arrays["v"], where=job.where, digest=self._digest
            )
        deliver(job, arrays)
