"""GuardedReader: the StorageReader. DCP calls, in this order (state_dict_loader.py):

every rank    reset, read_metadata   the manifest; an error is kept, for DCP would hide its type
every rank    set_up_storage_reader  and raised here
every rank    prepare_local_plan     certificates are proved; an error still stops all ranks before any target changes
coordinator   prepare_global_plan    all ranks have read the same manifest
every rank    read_data              loading.RankLoad
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from guarddcp.container.layout import checksum
from guarddcp.container.manifest import Manifest
from guarddcp.container.summary import summarise
from guarddcp.dcp.fetching import Fetcher
from guarddcp.dcp.loading import RankLoad
from guarddcp.dcp.metadata import metadata_of
from guarddcp.dcp.names import parameter_namer
from guarddcp.dcp.opening import read_manifest
from guarddcp.dcp.pipeline import OrderedPool, default_threads
from guarddcp.errors import FormatError, GuardError, IntegrityError
from guarddcp.report import Report
from guarddcp.storage.store import ReadStats, Store

__all__ = ["GuardedReader", "Verify"]

Verify = Literal["full", "before", "checksum"]


@dataclass
class _Load:
    """One load, on one thread."""

    path: str
    store: Store
    manifest: Manifest | None = None
    error: Exception | None = None
    paths: dict[str, Any] = field(default_factory=dict)


class GuardedReader(StorageReader):
    """Reads a checkpoint of `GuardedWriter` on any number of ranks and proves its tolerance again.

    Parameters
    ----------
    path: local path or any fsspec URL; ``checkpoint_id`` of a load replaces it.
    verify: "full": certificates first, then per frame checksum, code range and digest of the decoded moments.
        "before": a whole pass over the needed bytes first, so that an error leaves every target as it was.
        "checksum": certificates and checksums, no digests.
    threads: decoding threads; default: the cores this process may use.
    storage_options: passed to the fsspec filesystem verbatim.
    allow_pickle: load values that were stored as pickle and that torch's safe unpickler refuses. They can run code.

    ``report`` tells what this rank read. An error in "full" after the certificates says that targets are undefined.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        threads: int | None = None,
        storage_options: dict[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        if verify not in ("full", "before", "checksum"):
            raise ValueError(f"verify must be 'full', 'before' or 'checksum', not {verify!r}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.path = os.fspath(path)
        self.verify = verify
        self.report: Report | None = None
        self._threads = threads
        self._storage_options = storage_options
        self._allow_pickle = allow_pickle
        self._local = threading.local()  # one reader may load on several threads at once
        Store(self.path, storage_options)  # refuses a malformed path at once

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    @property
    def _now(self) -> _Load:
        """The load of this thread."""
        if not hasattr(self._local, "load"):
            self._local.load = _Load(self.path, Store(self.path, self._storage_options))
        load: _Load = self._local.load
        return load

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URL; what is wrong with it is said when it is read."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        path = self.path if checkpoint_id is None else os.fspath(checkpoint_id)
        self._local.load = _Load(path, Store(path, self._storage_options))

    @property
    def checkpoint_id(self) -> str:
        return self._now.path

    def read_metadata(self) -> Metadata:
        now = self._now
        now.manifest = now.error = None
        self._now.store.stats = ReadStats()  # of one load each
        try:
            self._now.manifest = read_manifest(self._now.store)
            metadata = metadata_of(self._now.manifest)
        except Exception as error:  # raised again in set_up_storage_reader, where DCP keeps its type
            self._now.error = error
            return Metadata(state_dict_metadata={})
        self._now.paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = None
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._now.error is not None:
            raise self._now.error
        if self._now.manifest is None:
            raise GuardError("set_up_storage_reader before read_metadata", where=self._now.path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        with OrderedPool(self._threads or default_threads()) as pool, self._telling_of_vanished():
            load = self._load(pool)
            load.prove(plan)
            if self.verify == "before":
                load.check_all(plan)
        return dataclasses.replace(plan, storage_data=self._identity())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Every rank has read the manifest by itself, one perhaps before it was replaced and another after.
        found = {plan.storage_data for plan in plans if plan.storage_data is not None}
        if len(found) > 1:
            raise IntegrityError(
                "the checkpoint was overwritten while the ranks read its manifest",
                where=self._now.path,
                expected="one checkpoint on all ranks",
                got=f"{len(found)} of them",
                hint="Load again: no target was changed",
            )
        return plans

    def _identity(self) -> str:
        """Short, and different for every save: its data files have random names."""
        assert self._now.manifest is not None
        return f"{checksum(''.join(entry.name for entry in self._now.manifest.files).encode()):016x}"

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        manifest = self._now.manifest
        assert manifest is not None
        with OrderedPool(self._threads or default_threads()) as pool, self._telling_of_vanished():
            load = self._load(pool)
            certificates = load.prove(plan)
            try:
                shards = load.load(plan, planner)
            except (IntegrityError, FormatError) as error:
                error.args = (f"{error}. The load stopped; what the targets hold is undefined",)
                raise
        self.report = summarise(
            shards,
            [],
            [],
            [],
            tensors=manifest.tensors,
            guard=manifest.guard,
            parameter_of=parameter_namer(self._now.paths),
        )
        self.report.certificates = certificates
        stats = self._now.store.stats
        self.report.bytes_asked, self.report.bytes_fetched = stats.bytes_asked, stats.bytes_fetched
        self.report.requests = stats.requests
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load(self, pool: OrderedPool) -> RankLoad:
        assert self._now.manifest is not None
        fetcher = Fetcher(self._now.manifest, self._now.store, pool, digest=self.verify != "checksum")
        return RankLoad(self._now.manifest, fetcher, allow_pickle=self._allow_pickle)

    @contextlib.contextmanager
    def _telling_of_vanished(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._vanished(error) from error

    def _vanished(self, error: FileNotFoundError) -> GuardError:
        """A data file is missing: overwritten while reading, or removed by hand."""
        try:
            now = read_manifest(self._now.store).files
        except GuardError:
            now = []
        assert self._now.manifest is not None
        if [entry.name for entry in now] != [entry.name for entry in self._now.manifest.files]:
            return IntegrityError(
                "the checkpoint was overwritten while reading",
                where=self._now.path,
                hint="Load again: the new checkpoint is whole. What the targets hold may be undefined",
            )
        return IntegrityError(f"a data file of the checkpoint is missing: {error}", where=self._now.path)
