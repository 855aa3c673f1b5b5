"""What a save, a load or a verification did, as plain dataclasses with ``to_json``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

__all__ = ["ParameterReport", "Report", "Totals"]


@dataclass
class Totals:
    """Sums over shards. A coordinate is one entry of a moment pair (8 raw bytes), or one element of another tensor.

    ``stored_bytes``: planes, escapes, headers, side data and the share of frame tables. ``escapes_by_cause`` as
    `guarddcp.codecs.ratio.CAUSES` names them, zeros left out.
    """

    coordinates: int = 0
    escapes: int = 0
    escapes_by_cause: dict[str, int] = field(default_factory=dict)
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def ratio(self) -> float:
        """stored / raw, 0 for nothing."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else 0.0


@dataclass
class ParameterReport(Totals):
    """One parameter's moments, or one other tensor.

    ``shape``: of the global tensor. ``evidence``: "proved" or "exact"; "mixed" if its shards differ.
    ``certified_bound``: the largest of its shards, in units of lr; None without a certificate. ``reason``: why moments
    are exact. ``failed_frames``: stored exactly after a failed self-check.
    """

    shape: tuple[int, ...] = ()
    codec: str = "exact"
    evidence: str = "exact"
    certified_bound: float | None = None
    rounding_horizon: int | None = None
    bound_at_100k: float | None = None
    failed_frames: int = 0
    reason: str = ""


@dataclass
class Report:
    """``horizon``: the shortest that a certificate proves (the guard's if nothing is guarded). ``moments``: what
    certificates cover. ``exact``: all the rest. ``parameters``: moments by parameter name,
    exact ones too; ``tensors``: all other tensors by key.
    ``certified_bound``: largest over all shards (None if nothing is guarded).
    """

    tolerance: float | None = None
    horizon: int | str | None = None
    moments: Totals = field(default_factory=Totals)
    exact: Totals = field(default_factory=Totals)
    parameters: dict[str, ParameterReport] = field(default_factory=dict)
    tensors: dict[str, ParameterReport] = field(default_factory=dict)
    certified_bound: float | None = None
    rounding_horizon: int | None = None
    bound_at_100k: float | None = None
    failed_frames: int = 0
    certificates: int = 0
    bytes_asked: int = 0
    bytes_fetched: int = 0
    requests: int = 0
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong (only a verification collects problems; saves and loads raise)."""
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"ok": self.ok}

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON; an infinite bound is null."""
        return json.dumps(_finite(self.to_dict()), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value
