"""Re-proving a whole checkpoint without a model: `verify`, and what the manifest alone tells: `inspect_checkpoint`.

manifest    parses, validates
files       there, with their recorded sizes
proofs      every certificate recomputed from its constants
groups      each certificate's betas, eps and step held against the param groups and steps stored beside it
bytes       every block of every file: checksum, decode, code range, digest; every value parsed
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from guarddcp.certificate import Certificate
from guarddcp.container.manifest import Manifest
from guarddcp.container.records import IN_PACK, PACKED, RATIO, TREE
from guarddcp.container.value_types import DTYPES
from guarddcp.container.values import decode_value
from guarddcp.dcp.fetching import Fetcher
from guarddcp.dcp.groups import GroupLookup, Guarded, groups_from_values
from guarddcp.dcp.loading import prove_all, scratch
from guarddcp.dcp.opening import read_manifest
from guarddcp.dcp.pipeline import OrderedPool, default_threads
from guarddcp.dcp.saving import GIVEN_RULE
from guarddcp.dcp.tensors import tensor_of_bytes
from guarddcp.dcp.writer import report_of
from guarddcp.errors import GuardError, IntegrityError, ToleranceError
from guarddcp.report import Report
from guarddcp.storage.store import Store

__all__ = ["examine", "inspect_checkpoint", "verify"]


def inspect_checkpoint(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> Report:
    """The report of a checkpoint from its manifest alone: nothing else is read, nothing is proved.

    Raises CheckpointNotFoundError, FormatError or IntegrityError.
    """
    return report_of(read_manifest(Store(path, storage_options)))


def verify(
    path: str | os.PathLike[str], *, threads: int | None = None, storage_options: dict[str, Any] | None = None
) -> Report:
    """Re-prove a whole checkpoint; returns its report.

    Raises ToleranceError if a certificate does not prove its tolerance or is not that of the optimizer stored beside
    it, IntegrityError (or FormatError) if bytes are not those that were written; the message lists what was found.
    """
    report = examine(path, threads=threads, storage_options=storage_options)
    if report.problems:
        kind = ToleranceError if any(line.startswith("ToleranceError") for line in report.problems) else IntegrityError
        shown = "; ".join(report.problems[:5])
        more = f"; and {len(report.problems) - 5} more" if len(report.problems) > 5 else ""
        raise kind(f"{len(report.problems)} problem(s): {shown}{more}", where=os.fspath(path))
    return report


def examine(
    path: str | os.PathLike[str], *, threads: int | None = None, storage_options: dict[str, Any] | None = None
) -> Report:
    """As `verify`, but collects what is wrong in ``report.problems``. Raises only if there is no readable manifest."""
    store = Store(path, storage_options)
    manifest = read_manifest(store)
    report = report_of(manifest)
    found = _Problems(report.problems)
    for certificate, key in _owners(manifest).items():
        found.catch(partial(prove_all, {certificate: key}))
    for entry in manifest.files:
        found.catch(partial(_check_size, store, entry.name, entry.size))
    if not report.problems:
        with OrderedPool(threads or default_threads()) as pool:
            _examine_bytes(manifest, Fetcher(manifest, store, pool), found)
    stats = store.stats
    report.bytes_asked, report.bytes_fetched, report.requests = stats.bytes_asked, stats.bytes_fetched, stats.requests
    return report


def _owners(manifest: Manifest) -> dict[Certificate, str]:
    """Every certificate, with one key that it stands for."""
    owners: dict[Certificate, str] = {}
    for record in manifest.shards():
        if record.certificate is not None:
            owners.setdefault(record.certificate, record.members[0][1])
    return dict.fromkeys(manifest.certificates, "a certificate without a shard") | owners


class _Problems:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def add(self, error: Exception) -> None:
        self._lines.append(f"{type(error).__name__}: {error}")

    def catch(self, job: Callable[[], object]) -> bool:
        """Run a job; note a guarddcp error or OSError; returns whether it went through."""
        try:
            job()
        except (GuardError, OSError) as error:
            self.add(error)
            return False
        return True


def _check_size(store: Store, name: str, size: int) -> None:
    try:
        found = store.size(name)
    except FileNotFoundError as error:
        raise IntegrityError("data file is missing", where=store.where(name), expected=f"{size} bytes") from error
    if found != size:
        raise IntegrityError("data file of another size", where=store.where(name), expected=size, got=found)


def _examine_bytes(manifest: Manifest, fetcher: Fetcher, found: _Problems) -> None:
    files = [n for n in range(len(manifest.files)) if found.catch(partial(fetcher.open_files, [n]))]
    packs: dict[int, bytes] = {}

    def read_pack(index: int) -> None:
        packs[index] = fetcher.read_pack(index).tobytes()

    for index, pack in enumerate(manifest.packs):
        if pack.file in files:
            found.catch(partial(read_pack, index))
    values = _Values(manifest, packs)
    for key in manifest.values:
        found.catch(partial(values.check, key))
    for index in range(manifest.num_shards):
        record = manifest.shard(index)
        if record.codec in IN_PACK:
            found.catch(partial(values.check_tensor, record))
        elif record.file in files:
            found.catch(partial(_examine_shard, fetcher, index))
    if len(packs) == len(manifest.packs):  # param groups and steps lie in packs; a damaged one is a problem by itself
        _hold_against_groups(manifest, values, found)


def _examine_shard(fetcher: Fetcher, index: int) -> None:
    shard = fetcher.open_shard(index)
    whole = tuple((0, size) for size in shard.layout.sizes)
    fetcher.run([(shard, [whole])], scratch, lambda job, arrays: None)


class _Values:
    """Stored values and small tensors by key, from the packs that could be read."""

    def __init__(self, manifest: Manifest, packs: dict[int, bytes]) -> None:
        self._manifest, self._packs = manifest, packs

    def check(self, key: str) -> None:
        record = self._manifest.values[key]
        if record.pack in self._packs and record.kind == "plain":
            decode_value(self._packs[record.pack][record.begin : record.begin + record.length])

    def check_tensor(self, record: Any) -> None:
        if record.pack in self._packs and record.codec == TREE:
            decode_value(self._packs[record.pack][record.pack_begin : record.pack_begin + record.bytes])

    def get(self, key: str) -> object:
        """The value, or small whole tensor, under ``key``; None if there is none or it could not be read."""
        if key in self._manifest.values:
            value = self._manifest.values[key]
            if value.pack not in self._packs or value.kind != "plain":
                return None
            return decode_value(self._packs[value.pack][value.begin : value.begin + value.length])
        indexes = self._manifest.shard_indexes(key)
        records = [self._manifest.shard(index) for index in indexes]
        entry = self._manifest.tensors.get(key)
        if entry is None or len(records) != 1 or records[0].codec != PACKED or records[0].pack not in self._packs:
            return None
        begin = records[0].pack_begin
        raw = self._packs[records[0].pack][begin : begin + records[0].bytes]
        return tensor_of_bytes(raw, DTYPES[entry.dtype]).reshape(entry.shape) if raw else None


def _hold_against_groups(manifest: Manifest, values: _Values, found: _Problems) -> None:
    paths = decode_value(manifest.planner_data.encode("ascii"))
    keys = [entry.key for entry in manifest.entries]
    planner_data = paths if isinstance(paths, dict) else None
    lookup = groups_from_values(values.get, keys, planner_data)
    pairs = {
        (record.members[0][1], record.certificate): record.reason == GIVEN_RULE
        for record in manifest.shards()
        if record.codec == RATIO and record.certificate is not None
    }
    for (key, certificate), is_given in pairs.items():
        source = groups_from_values(values.get, keys, planner_data, certificate.rule) if is_given else lookup
        found.catch(partial(_hold, key, certificate, source))


def _hold(key: str, certificate: Certificate, lookup: GroupLookup) -> None:
    rule = lookup.rule_for(MetadataIndex(key))
    if isinstance(rule, Guarded) and (rule.rule, rule.step) == (certificate.rule, certificate.step):
        return
    raise ToleranceError(
        "the certificate is not that of the optimizer stored in this checkpoint",
        where=key,
        expected=f"{rule.rule} at step {rule.step}" if isinstance(rule, Guarded) else f"none ({rule.message})",
        got=f"{certificate.rule} at step {certificate.step}",
    )
