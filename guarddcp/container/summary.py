"""Reports from shard records: the same sums for one rank's share and for a whole manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from guarddcp.certificate import Certificate, bound_at
from guarddcp.codecs.ratio import CAUSES
from guarddcp.codecs.view import Layout
from guarddcp.container.datafile import FileEntry
from guarddcp.container.layout import HEADER_BYTES, TRAILER
from guarddcp.container.records import (
    IN_PACK,
    M_SUFFIX,
    RATIO,
    V_SUFFIX,
    PackRecord,
    ShardRecord,
    TensorEntry,
    ValueRecord,
)
from guarddcp.container.value_types import DTYPES
from guarddcp.report import ParameterReport, Report, Totals

__all__ = ["FAR_STEP", "summarise"]

FAR_STEP = 100_000
"""The step whose bound is reported beside the rounding horizon."""


def summarise(
    shards: Iterable[ShardRecord],
    values: Iterable[ValueRecord],
    packs: Iterable[PackRecord],
    files: Iterable[FileEntry],
    *,
    tensors: dict[str, TensorEntry],
    guard: dict[str, Any],
    parameter_of: Callable[[str], str],
    warnings: Iterable[str] = (),
) -> Report:
    """``tensors``: dtype and global shape by key. ``parameter_of``: a first moment's key to its parameter's name."""
    report = Report(tolerance=guard.get("tolerance"), horizon=guard.get("horizon"), warnings=list(warnings))
    moment_blocks = blocks = 0
    used: set[Certificate] = set()
    for shard in shards:
        count = _num_blocks(shard)
        blocks += count
        if shard.codec == RATIO:
            moment_blocks += count
            assert shard.certificate is not None
            used.add(shard.certificate)
            _add_pair(report, shard, tensors, parameter_of)
        else:
            _add_tensor(report, shard, tensors, parameter_of)
    for pack in packs:
        blocks += 1
        report.exact.stored_bytes += pack.bytes
    report.exact.raw_bytes += sum(value.length for value in values)
    overhead = sum(entry.footer_bytes + HEADER_BYTES + TRAILER.size for entry in files)
    share = overhead * moment_blocks // blocks if blocks else 0
    report.moments.stored_bytes += share
    report.exact.stored_bytes += overhead - share
    if used:
        report.certificates = len(used)
        report.certified_bound = max(certificate.bound for certificate in used)
        horizons = {certificate.horizon for certificate in used}
        finite = [horizon for horizon in horizons if horizon != "all"]
        report.horizon = min(finite) if finite else "all"
        report.rounding_horizon = min(certificate.rounding_horizon for certificate in used)
        report.bound_at_100k = max(_bound_far(certificate) for certificate in used)
    return report


@lru_cache(maxsize=4096)
def _bound_far(certificate: Certificate) -> float:
    return bound_at(certificate, FAR_STEP)


def _num_blocks(shard: ShardRecord) -> int:
    if shard.codec in IN_PACK or shard.view is None:
        return 0
    frame_coordinates = int.from_bytes(shard.private[:4], "little")
    return 1 + Layout(shard.sizes, shard.view, max(1, frame_coordinates)).num_frames


def _add(totals: Totals, coordinates: int, raw: int, stored: int, escapes: dict[str, int]) -> None:
    totals.coordinates += coordinates
    totals.raw_bytes += raw
    totals.stored_bytes += stored
    totals.escapes += sum(escapes.values())
    for cause, count in escapes.items():
        totals.escapes_by_cause[cause] = totals.escapes_by_cause.get(cause, 0) + count


def _add_pair(
    report: Report, shard: ShardRecord, tensors: dict[str, TensorEntry], parameter_of: Callable[[str], str]
) -> None:
    key = shard.members[0][1]
    certificate = shard.certificate
    assert certificate is not None
    new = ParameterReport(shape=tensors[key].shape, codec="ratio", evidence="proved", certified_bound=0.0)
    one = report.parameters.setdefault(parameter_of(key), new)
    one.codec = "ratio"
    if one.evidence == "exact":
        one.evidence = "mixed"
    escapes = {cause: count for cause, count in zip(CAUSES, shard.escapes, strict=True) if count}
    for totals in (report.moments, one):
        _add(totals, shard.coordinates, 8 * shard.coordinates, shard.bytes, escapes)
    one.certified_bound = max(one.certified_bound or 0.0, certificate.bound)
    one.rounding_horizon = min(one.rounding_horizon or math.inf, certificate.rounding_horizon)  # type: ignore[assignment]
    one.bound_at_100k = max(one.bound_at_100k or 0.0, _bound_far(certificate))
    one.failed_frames += shard.failed
    report.failed_frames += shard.failed


def _add_tensor(
    report: Report, shard: ShardRecord, tensors: dict[str, TensorEntry], parameter_of: Callable[[str], str]
) -> None:
    key = shard.members[0][1]
    entry = tensors[key]
    raw = shard.coordinates * DTYPES[entry.dtype].itemsize
    is_m, is_v = key.endswith(M_SUFFIX), key.endswith(V_SUFFIX)
    if is_m or is_v:
        name = parameter_of(key if is_m else key.removesuffix(V_SUFFIX) + M_SUFFIX)
        one = report.parameters.setdefault(name, ParameterReport(shape=entry.shape))
        one.evidence = "exact" if one.evidence == "exact" else "mixed"
    else:
        one = report.tensors.setdefault(key, ParameterReport(shape=entry.shape))
    one.reason = one.reason or shard.reason
    # An entry of a pair is one coordinate, counted where m is.
    _add(one, 0 if is_v else shard.coordinates, raw, shard.bytes, {})
    _add(report.exact, shard.coordinates, raw, 0 if shard.codec in IN_PACK else shard.bytes, {})
