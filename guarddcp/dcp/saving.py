"""One rank's share of a save: resolve, certify, encode, stream (the body of write_data).

run -> _pair   m, v -> rule -> certificate -> fit, encode frames on threads -> blocks of one record
    -> _tensor any tensor -> exact frames, or a pack if small, or the tree of a subclass
    -> _value  plain value -> tagged tree in a pack
-> pack flush -> footer -> WriteResults (m's carries the ShardRecord) and a RankPart
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from guarddcp.certificate import Certificate, Uncertifiable, certify, q_limit
from guarddcp.certificate.rules import rule_problem
from guarddcp.codecs import ratio
from guarddcp.codecs.choice import choose_certificate, sample_frames, sample_q
from guarddcp.codecs.planes import encode_exact
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.view import Layout, View, default_view
from guarddcp.config import Guard
from guarddcp.container.datafile import DataFileWriter
from guarddcp.container.records import (
    EXACT,
    PACKED,
    PICKLED,
    RATIO,
    TREE,
    PackRecord,
    RankPart,
    ShardRecord,
    ValueRecord,
)  # fmt: skip
from guarddcp.container.values import encode_value
from guarddcp.dcp.degradations import Degradations
from guarddcp.dcp.groups import Exact, Guarded, OptimizerGroups
from guarddcp.dcp.pairing import M_SUFFIX, V_SUFFIX, PairItem
from guarddcp.dcp.pipeline import OrderedPool
from guarddcp.dcp.subclasses import tree_of
from guarddcp.dcp.tensors import FrameSource, dtype_name, is_plain, raw_bytes, rotates
from guarddcp.errors import GuardBug, GuardError

__all__ = ["EXACT_FRAME_BYTES", "GIVEN_RULE", "PACK_BYTES", "SMALL_BYTES", "SMALL_PAIR", "RankSave"]

logger = logging.getLogger("guarddcp")

EXACT_FRAME_BYTES = 8 << 20
SMALL_BYTES = 16 << 10
"""Tensors up to this size share packs."""
SMALL_PAIR = 128
"""Pairs of at most this many coordinates are packed exactly: headers and tables would outweigh the gain."""
PACK_BYTES = 1 << 20

GIVEN_RULE = "rule: given to the writer in place of what the param group says"
"""Stands as reason with a coded pair, so that a verification does not hold it against the group."""


def _length(buffers: list[bytes | np.ndarray]) -> int:
    return sum(len(buffer) for buffer in buffers)


def _joined(buffers: Sequence[bytes | np.ndarray]) -> bytes:
    return b"".join(buffers)  # type: ignore[arg-type]


@dataclass
class _Open:
    """A record being written: its number once the first block is out, and what has gone into it."""

    record: int = -1
    bytes: int = 0
    failed: int = 0


class RankSave:
    """Writes one rank's items to one data file. ``open_stream``: the new object, open for writing."""

    def __init__(
        self,
        stream: Any,
        name: str,
        *,
        guard: Guard,
        groups: OptimizerGroups,
        pool: OrderedPool,
        rank: int,
        allow_pickle: bool,
    ) -> None:
        self._file = DataFileWriter(stream, name, rank)
        self._guard, self._groups, self._pool, self._rank = guard, groups, pool, rank
        self._allow_pickle = allow_pickle
        self._results: list[WriteResult] = []
        self._pack: list[bytes | np.ndarray] = []
        self._pack_size = 0
        self._packs: list[PackRecord] = []
        self.degradations = Degradations()

    def run(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[WriteResult], RankPart]:
        """Write every item of the plan; results in plan order, m before v. Any failure names the item."""
        for item in plan.items:
            try:
                self._item(item, planner)
            except GuardError:
                raise
            except Exception as error:
                raise GuardError(
                    f"could not save: {type(error).__name__}: {error}", where=f"rank {self._rank}, {item.index.fqn}"
                ) from error
        self._pool.drain()
        self._flush_pack()
        entry = self._file.finish()
        return self._results, RankPart(self._rank, (entry,), tuple(self._packs))

    def _item(self, item: WriteItem, planner: SavePlanner) -> None:
        if isinstance(item, PairItem):
            m_item, v_item = item.members
            self._pair(m_item, v_item, self._resolve(m_item, planner), self._resolve(v_item, planner))
        elif item.type == WriteItemType.BYTE_IO:
            self._value(item, planner)
        else:
            self._tensor(item.index, item, self._resolve(item, planner), self._why_alone(item))

    def _why_alone(self, item: WriteItem) -> str:
        """The reason why a moment was not planned as part of a pair; "" for all other tensors."""
        if not item.index.fqn.endswith((M_SUFFIX, V_SUFFIX)) or item.tensor_data is None:
            return ""
        if (dtype := item.tensor_data.properties.dtype) != torch.float32:
            return self._exactly("dtype", f"moments of {dtype_name(dtype)}; only float32 pairs are coded", item)
        return self._exactly("unpaired", "float32 exp_avg and exp_avg_sq of one chunk were not both there", item)

    def _resolve(self, item: WriteItem, planner: SavePlanner) -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        assert item.tensor_data is not None
        planned = (item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
        if (found := (tensor.dtype, tuple(tensor.shape))) != planned:
            raise GuardError(
                "the tensor is not the one that was planned",
                where=f"rank {self._rank}, {item.index.fqn}",
                expected=f"{planned[0]} {planned[1]}",
                got=f"{found[0]} {found[1]}",
                hint="Plan caching does not notice that a dtype changed: save with enable_plan_caching=False from here",
            )
        return tensor

    # -- moment pairs --------------------------------------------------------------------------------------------

    def _pair(self, m_item: WriteItem, v_item: WriteItem, m: torch.Tensor, v: torch.Tensor) -> None:
        found = self._certificate(m_item, m, v)
        if isinstance(found, str):
            self._tensor(m_item.index, m_item, m, found)
            self._tensor(v_item.index, v_item, v, found)
            return
        layout = Layout(tuple(m.shape), default_view(m.shape), ratio.FRAME_COORDINATES)
        data = m_item.tensor_data
        assert data is not None
        record = ShardRecord(
            members=(("m", m_item.index.fqn), ("v", v_item.index.fqn)),
            offsets=tuple(data.chunk.offsets),
            sizes=layout.sizes,
            codec=RATIO,
            view=layout.view,
            certificate=found,
            reason=GIVEN_RULE if self._groups.rule_is_given else "",
        )
        self._encode_pair(record, layout, FrameSource(m, layout), FrameSource(v, layout), (m_item.index, v_item.index))

    def _certificate(self, item: WriteItem, m: torch.Tensor, v: torch.Tensor) -> Certificate | str:
        """The pair's certificate, or the reason ("slug: why") why it is stored exactly."""
        if self._guard.codec == "exact":
            return "codec: the guard asks for exact storage"
        found = self._groups.rule_for(item.index)
        if isinstance(found, Exact):
            return self._exactly(found.reason, found.message, item)
        if not (is_plain(m) and is_plain(v)):
            return self._exactly("tensor-type", f"a moment is a {type(m).__name__}, not a plain tensor", item)
        if (problem := rule_problem(found.rule)) is not None:
            return self._exactly("hyperparameters", problem, item)
        if m.numel() <= SMALL_PAIR:
            return f"small: at most {SMALL_PAIR} coordinates are packed as they are"
        layout = Layout(tuple(m.shape), default_view(m.shape), ratio.FRAME_COORDINATES)
        m_source, v_source = FrameSource(m, layout), FrameSource(v, layout)
        samples = [sample_q(m_source.block(f.number), v_source.block(f.number)) for f in sample_frames(layout)]
        try:
            certificate = choose_certificate(np.concatenate(samples), found.rule, found.step, self._guard)
        except Uncertifiable as error:
            error = self._for_every_pair(found) or error
            return self._exactly(error.reason, str(error), item)
        except (GuardBug, ArithmeticError) as error:  # never lose a save for want of a certificate
            logger.error("%s: no certificate, please report this: %s", item.index.fqn, error, exc_info=error)
            return self._exactly("bug", f"{type(error).__name__}: {error}", item)
        if certificate.horizon != self._guard.horizon:
            text = f"proved for horizon {certificate.horizon} only (coupled weight decay)"
            self.degradations.add("horizon", text, item.index.fqn)
        return certificate

    def _for_every_pair(self, found: Guarded) -> Uncertifiable | None:
        """What would do for every pair of the group, whatever its |q|: so that one line speaks for all of them."""
        guard = self._guard
        try:
            certify(
                found.rule,
                found.step,
                tolerance=guard.tolerance,
                horizon=guard.horizon,
                rounding_share=guard.rounding_share,
                q_max=q_limit(found.rule),
            )
        except Uncertifiable as error:
            return error
        return None

    def _encode_pair(
        self,
        record: ShardRecord,
        layout: Layout,
        m: FrameSource,
        v: FrameSource,
        indexes: tuple[MetadataIndex, MetadataIndex],
    ) -> None:
        assert record.certificate is not None
        params = ratio.params_of(record.certificate)
        state, escapes = _Open(), np.zeros(len(ratio.CAUSES), np.int64)
        where = f"rank {self._rank}, {indexes[0].fqn}"

        def fit(number: int) -> Any:
            return RowCol.fit_frame(v.block(number), layout.frame(number), layout, params)

        def encode(number: int, predictor: RowCol) -> ratio.EncodedFrame:
            frame = layout.frame(number)
            return ratio.encode_frame(m.block(number), v.block(number), predictor.terms(frame), params)

        def write_side(predictor: RowCol) -> bytes:
            private, side = ratio.encode_side(predictor, layout.frame_coordinates)
            self._block(state, side)
            return private.to_bytes()

        def write_frame(frame: ratio.EncodedFrame) -> None:
            self._block(state, frame.buffers)
            nonlocal escapes
            escapes = escapes + frame.escapes
            if frame.failed:
                state.failed += 1
                logger.error(
                    "%s: a coded frame failed its self-check and was stored exactly: please report this", where
                )

        def close(private: bytes) -> None:
            done = replace(
                record,
                private=private,
                record=state.record,
                bytes=state.bytes,
                failed=state.failed,
                escapes=tuple(escapes.tolist()),
            )
            self._results.append(WriteResult(indexes[0], state.bytes, done))
            self._results.append(WriteResult(indexes[1], 0, None))

        if layout.num_frames <= 1:

            def all_at_once() -> tuple[RowCol, list[ratio.EncodedFrame]]:
                predictor = RowCol.combine(layout, [fit(i) for i in range(layout.num_frames)], params)
                return predictor, [encode(i, predictor) for i in range(layout.num_frames)]

            def write_all(result: tuple[RowCol, list[ratio.EncodedFrame]]) -> None:
                private = write_side(result[0])
                for frame in result[1]:
                    write_frame(frame)
                close(private)

            self._pool.submit(all_at_once, write_all)
            return
        predictor = RowCol.combine(layout, self._pool.map(fit, layout.num_frames), params)
        privates: list[bytes] = []
        self._pool.submit(lambda: predictor, lambda p: privates.append(write_side(p)))
        for number in range(layout.num_frames):
            self._pool.submit(partial(encode, number, predictor), write_frame)
        self._pool.submit(lambda: None, lambda _: close(privates[0]))

    # -- everything else -----------------------------------------------------------------------------------------

    def _tensor(self, index: MetadataIndex, item: WriteItem, tensor: torch.Tensor, reason: str) -> None:
        data = item.tensor_data
        assert data is not None
        record = ShardRecord(
            members=(("x", index.fqn),),
            offsets=tuple(data.chunk.offsets),
            sizes=tuple(data.chunk.sizes),
            codec=EXACT,
            reason=reason,
        )
        if not is_plain(tensor):
            self._odd_tensor(index, record, tensor)
        elif tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            self._into_pack(index, replace(record, codec=PACKED), raw_bytes(tensor))
        else:
            self._encode_exact(index, record, tensor)

    def _odd_tensor(self, index: MetadataIndex, record: ShardRecord, tensor: torch.Tensor) -> None:
        tree = tree_of(tensor)
        if tree is not None:
            self._into_pack(index, replace(record, codec=TREE), tree)
            return
        kind = f"{type(tensor).__name__} of {dtype_name(tensor.dtype)}"
        buffer = io.BytesIO()
        torch.save(tensor.detach(), buffer)
        self._pickled(index.fqn, kind)
        self._into_pack(index, replace(record, codec=PICKLED), buffer.getvalue())

    def _into_pack(self, index: MetadataIndex, record: ShardRecord, raw: bytes | np.ndarray) -> None:
        begin = self._pack_append(raw)
        record = replace(record, pack=len(self._packs), pack_begin=begin, bytes=len(raw))
        self._results.append(WriteResult(index, len(raw), record))
        self._flush_pack_if_full()

    def _encode_exact(self, index: MetadataIndex, record: ShardRecord, tensor: torch.Tensor) -> None:
        item_bytes = tensor.element_size()
        frame_coordinates = EXACT_FRAME_BYTES // item_bytes
        layout = Layout(record.sizes, View(tuple(range(tensor.ndim)), 0), frame_coordinates)
        source, state = FrameSource(tensor, layout), _Open()
        record = replace(record, view=layout.view, private=struct.pack("<I", frame_coordinates))

        def encode(number: int) -> list[bytes | np.ndarray]:
            return encode_exact(source.raw(number), item_bytes, rotate=rotates(tensor.dtype))

        def close(_: object) -> None:
            done = replace(record, record=state.record, bytes=state.bytes)
            self._results.append(WriteResult(index, state.bytes, done))

        self._pool.submit(lambda: [], lambda side: self._block(state, side))
        for number in range(layout.num_frames):
            self._pool.submit(partial(encode, number), lambda frame: self._block(state, frame))
        self._pool.submit(lambda: None, close)

    def _value(self, item: WriteItem, planner: SavePlanner) -> None:
        buffer = planner.resolve_data(item)
        assert isinstance(buffer, io.BytesIO)
        stored = buffer.getvalue()
        kind, tree = "pickle", None
        try:
            buffer.seek(0)
            # These bytes were made a moment ago, in this process, by the planner.
            tree = encode_value(torch.load(buffer, weights_only=False))
        except Exception as error:
            logger.debug("%s: not torch.save's bytes (%s); kept as they are", item.index.fqn, error)
        if tree is not None:
            kind, stored = "plain", tree
        else:
            self._pickled(item.index.fqn, "a value without a plain form")
        begin = self._pack_append(stored)
        record = ValueRecord(item.index.fqn, kind, len(self._packs), begin, len(stored))
        self._results.append(WriteResult(item.index, len(stored), record))
        self._flush_pack_if_full()

    # -- blocks and packs ----------------------------------------------------------------------------------------

    def _block(self, state: _Open, buffers: Sequence[bytes | np.ndarray]) -> None:
        if state.record < 0:
            state.record = self._file.begin_record()
        state.bytes += self._file.write_block(buffers)

    def _pack_append(self, raw: bytes | np.ndarray) -> int:
        begin = self._pack_size
        self._pack.append(bytes(raw))
        self._pack_size += len(raw)
        return begin

    def _flush_pack_if_full(self) -> None:
        if self._pack_size >= PACK_BYTES:
            self._flush_pack()

    def _flush_pack(self) -> None:
        if not self._pack:
            return
        self._pool.drain()  # records are numbered in the order in which their first block is written
        raw, state = np.frombuffer(_joined(self._pack), np.uint8), _Open()
        self._block(state, encode_exact(raw, 1, rotate=False))
        self._packs.append(PackRecord(0, state.record, state.bytes, raw.size))
        self._pack, self._pack_size = [], 0

    # -- what is said once ---------------------------------------------------------------------------------------

    def _exactly(self, slug: str, why: str, item: WriteItem) -> str:
        self.degradations.add(slug, f"stored exactly: {why}", item.index.fqn)
        return f"{slug}: {why}"

    def _pickled(self, key: str, what: str) -> None:
        if not self._allow_pickle:
            raise GuardError(
                f"{what} can only be stored as pickle",
                where=f"rank {self._rank}, {key}",
                hint="Pass allow_pickle=True, or save a plain value",
            )
        self.degradations.add(
            "pickle",
            "stored as pickle (a load will need allow_pickle=True unless torch's safe unpickler takes it)",
            key,
        )
