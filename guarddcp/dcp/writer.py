"""GuardedWriter: the StorageWriter. DCP calls, in this order (state_dict_saver.py):

    every rank    reset               a checkpoint_id was given: the next save goes there
    every rank    storage_meta
    every rank    set_up_storage_writer
    every rank    prepare_local_plan  m and v become one item (pairing.fold_pairs), before deduplication
    coordinator   prepare_global_plan
    every rank    write_data          saving.RankSave streams this rank's items into its own new file
    coordinator   finish              metadata back to two keys, coverage, manifest, commit

State of one save is kept per thread: with async_save all hooks of one save run on one thread, and two saves of one
writer may overlap.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from guarddcp.certificate import Adam
from guarddcp.config import Guard
from guarddcp.container import manifest as manifests
from guarddcp.container.layout import DATA_SUFFIX, MANIFEST_NAME
from guarddcp.container.manifest import Manifest
from guarddcp.container.records import RankPart, ShardRecord, TensorEntry, ValueRecord
from guarddcp.container.summary import summarise
from guarddcp.container.values import decode_value
from guarddcp.dcp.degradations import Degradation, lines_of
from guarddcp.dcp.groups import OptimizerGroups, moments_hidden
from guarddcp.dcp.metadata import entries_of, planner_data_text, storage_meta_text
from guarddcp.dcp.names import parameter_namer
from guarddcp.dcp.opening import read_manifest
from guarddcp.dcp.pairing import PairItem, check_coverage, fold_pairs, unfold_metadata
from guarddcp.dcp.pipeline import OrderedPool, default_threads
from guarddcp.dcp.saving import RankSave
from guarddcp.dcp.tensors import dtype_name
from guarddcp.errors import CheckpointExistsError, GuardError
from guarddcp.report import Report
from guarddcp.storage.commit import commit
from guarddcp.storage.store import Store
from guarddcp.version import __version__

__all__ = ["GuardedWriter"]

logger = logging.getLogger("guarddcp")


@dataclass
class _Save:
    """One save, on one thread."""

    path: str
    save_id: str
    rank: int = 0


class GuardedWriter(StorageWriter):
    """Writes a checkpoint whose Adam moments are compressed under a proved tolerance, and everything else exactly.

    Parameters
    ----------
    path: local path or any fsspec URL of the checkpoint's folder; ``checkpoint_id`` of a save replaces it.
    guard: the promise (`guarddcp.Guard`).
    optimizer: if given, its type must be torch's Adam or AdamW itself, else its moments are stored exactly.
    rule: `guarddcp.Adam`, replaces what param groups say (steps are still looked up).
    overwrite: replace a checkpoint that is already at the path; it stays readable until the new one is committed.
    threads: encoding threads; default: the cores this process may use.
    storage_options: passed to the fsspec filesystem verbatim.
    allow_pickle: store values without a plain form as pickle, marked and said; False refuses them.

    After a save ``report`` holds the whole checkpoint's report on the coordinator, this rank's share elsewhere; the
    metadata that ``dcp.save`` returns carries the whole one on every rank as ``guard_report``. Errors are
    `guarddcp.errors.GuardError`s inside DCP's CheckpointException; nothing is committed then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        guard: Guard | None = None,
        *,
        optimizer: object | None = None,
        rule: Adam | None = None,
        overwrite: bool = False,
        threads: int | None = None,
        storage_options: dict[str, Any] | None = None,
        allow_pickle: bool = True,
    ) -> None:
        super().__init__()
        _check_kind("guard", guard, Guard)
        _check_kind("rule", rule, Adam)
        _check_kind("threads", threads, int)
        _check_kind("storage_options", storage_options, dict)
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.path = os.fspath(path)
        self.guard = Guard() if guard is None else guard
        self.overwrite = overwrite
        self.report: Report | None = None
        # The type alone: a writer is pickled for asynchronous saves, and live state is not what is being saved.
        self._optimizer_type = optimizer if optimizer is None or isinstance(optimizer, type) else type(optimizer)
        self._rule = rule
        self._threads = threads
        self._storage_options = storage_options
        self._allow_pickle = allow_pickle
        self._local = threading.local()
        Store(self.path, storage_options)  # refuses a malformed path at once

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    # -- hooks ---------------------------------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URL; what is wrong with it is said when it is used."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._local.next_path = None if checkpoint_id is None else os.fspath(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Path of the save that this thread begins next."""
        return getattr(self._local, "next_path", None) or self.path

    def storage_meta(self) -> StorageMeta | None:
        # The first hook of every save: from here on a checkpoint_id counts for this one alone, come what may.
        self._save = _Save(self.checkpoint_id, save_id=uuid.uuid4().hex)
        self._local.next_path = None
        return StorageMeta(checkpoint_id=self._save.path, save_id=self._save.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise GuardError(
                "use_collectives=False writes one checkpoint per rank, without deduplication or resharding",
                hint="Save with collectives, or give every rank a writer and a path of its own and no_dist=True",
            )
        self._save.rank = kwargs.get("rank") or 0
        if is_coordinator and not self.overwrite and self._store().exists(MANIFEST_NAME):
            raise CheckpointExistsError(
                "a checkpoint is already there",
                where=self._store().where(MANIFEST_NAME),
                hint="Pass overwrite=True to replace it, or write to another path.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return fold_pairs(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        plan = fold_pairs(plan)  # again: a plan cached by another writer of this process arrives unfolded
        name = secrets.token_hex(16) + DATA_SUFFIX
        where = f"rank {self._save.rank}, {self._store().where(name)}"
        with _as_guard_error(where), self._store().create(name) as stream:
            with OrderedPool(self._threads or default_threads()) as pool:
                save = RankSave(
                    stream,
                    name,
                    guard=self.guard,
                    groups=OptimizerGroups(planner, self._optimizer_type, self._rule),
                    pool=pool,
                    rank=self._save.rank,
                    allow_pickle=self._allow_pickle,
                )
                results, part = save.run(plan, planner)
            degradations = [*self._hidden_moments(plan, planner), *save.degradations.all()]
            self.report = self._share(plan, results, part)
            self.report.warnings = lines_of(degradations)
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, part, *degradations])  # type: ignore[list-item]
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = self._store()
        parts = [part for of_rank in results for part in of_rank if isinstance(part, RankPart)]
        written = [entry.name for part in parts for entry in part.files]
        try:
            unfold_metadata(metadata)
            check_coverage(metadata, results)
            manifest = self._manifest(metadata, results)
            old = _files(store) if self.overwrite else []
            commit(store, MANIFEST_NAME, manifests.to_bytes(manifest), overwrite=self.overwrite)
        except BaseException as error:
            # A commit may fail after it took effect (the last fsync, a lost response): then its files must stay.
            if isinstance(error, CheckpointExistsError) or not set(written) & set(_files(store, unreadable=written)):
                _delete(store, written)
            raise
        self.report = report_of(manifest)
        self.report.warnings = lines_of(one for of_rank in results for one in of_rank if isinstance(one, Degradation))
        for line in self.report.warnings:
            logger.warning("%s: %s", self._save.path, line)
        metadata.guard_report = self.report  # type: ignore[attr-defined]
        metadata.storage_data = {}
        _delete(store, old)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def _save(self) -> _Save:
        save: _Save | None = getattr(self._local, "save", None)
        if save is None:
            raise GuardError("a hook was called before storage_meta on this thread")
        return save

    @_save.setter
    def _save(self, save: _Save) -> None:
        self._local.save = save

    def _store(self) -> Store:
        return Store(self._save.path, self._storage_options)

    def _manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        ranks = []
        for of_rank in results:
            records = [getattr(result, "storage_data", None) for result in of_rank]
            shards = [record for record in records if isinstance(record, ShardRecord)]
            values = [record for record in records if isinstance(record, ValueRecord)]
            ranks += [(part, shards, values) for part in of_rank if isinstance(part, RankPart)]
        by_key = {value.key: value for _, _, values in ranks for value in values}
        # Always anew: plan caching hands in the metadata of an earlier save.
        metadata.storage_meta = StorageMeta(checkpoint_id=self._save.path, save_id=self._save.save_id)
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.chunks.sort(key=lambda chunk: (chunk.offsets, chunk.sizes))  # as a reader lists them
        return manifests.build(
            entries_of(metadata, by_key),
            ranks,
            guard=self.guard.to_dict(),
            writer=f"guarddcp {__version__}",
            planner_data=planner_data_text(metadata.planner_data),
            storage_meta=storage_meta_text(metadata.storage_meta),
        )

    def _share(self, plan: SavePlan, results: list[WriteResult], part: RankPart) -> Report:
        """This rank's share of the report; finish replaces it on the coordinator."""
        records = [result.storage_data for result in results]
        items = [item for one in plan.items for item in (one.members if isinstance(one, PairItem) else (one,))]
        tensors = {
            item.index.fqn: TensorEntry(
                item.index.fqn, dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.size)
            )
            for item in items
            if item.tensor_data is not None
        }
        return summarise(
            [record for record in records if isinstance(record, ShardRecord)],
            [record for record in records if isinstance(record, ValueRecord)],
            part.packs,
            part.files,
            tensors=tensors,
            guard=self.guard.to_dict(),
            parameter_of=parameter_namer({}),
        )

    def _hidden_moments(self, plan: SavePlan, planner: SavePlanner) -> list[Degradation]:
        if any(isinstance(item, PairItem) for item in plan.items):
            return []
        hidden = moments_hidden(planner)
        byte_items = {item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO}
        text = "0 moments seen, a whole optimizer is one value; flatten_state_dict=True would show them"
        return [Degradation("hidden", text, (key,)) for key in hidden if key in byte_items]


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} must be a {kind.__name__}, not {value!r}")


def report_of(manifest: Manifest) -> Report:
    """The report of a whole checkpoint, from its manifest alone."""
    paths = decode_value(manifest.planner_data.encode("ascii"))
    return summarise(
        manifest.shards(),
        manifest.values.values(),
        manifest.packs,
        manifest.files,
        tensors=manifest.tensors,
        guard=manifest.guard,
        parameter_of=parameter_namer(paths if isinstance(paths, dict) else {}),
    )


def _files(store: Store, unreadable: Sequence[str] = ()) -> list[str]:
    """Data files of the checkpoint at the store; none without a manifest of ours, ``unreadable`` if the store fails."""
    try:
        return [entry.name for entry in read_manifest(store).files]
    except GuardError:
        return []
    except OSError:
        return list(unreadable)


def _delete(store: Store, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            store.delete(name)


@contextlib.contextmanager
def _as_guard_error(where: str) -> Iterator[None]:
    """Foreign errors may not survive the way to the other ranks."""
    try:
        yield
    except GuardError:
        raise
    except Exception as error:
        raise GuardError(f"could not write: {type(error).__name__}: {error}", where=where) from error
