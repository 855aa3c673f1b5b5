"""``guarddcp inspect`` and ``guarddcp verify``: a checkpoint's report as a table or JSON."""

from __future__ import annotations

import math
from typing import Any

from guarddcp.report import ParameterReport, Report

__all__ = ["render_report", "run_inspect", "run_verify"]

_NAME_WIDTH = 40


def run_inspect(path: str, *, as_json: bool, storage_options: dict[str, Any] | None) -> int:
    """Print what the manifest says; reads and proves nothing else."""
    from guarddcp.dcp.verification import inspect_checkpoint

    report = inspect_checkpoint(path, storage_options=storage_options)
    _print(path, report, as_json, "read from the manifest; nothing was proved")
    return 0


def run_verify(path: str, *, as_json: bool, storage_options: dict[str, Any] | None) -> int:
    """Check every byte, prove every certificate; exit code 1 if anything is wrong."""
    from guarddcp.dcp.verification import examine

    report = examine(path, storage_options=storage_options)
    if report.ok:
        verdict = f"verified: {report.certificates} certificates proved, {report.bytes_fetched:,} bytes checked"
    else:
        verdict = f"NOT VERIFIED: {len(report.problems)} problem(s)"
    _print(path, report, as_json, verdict)
    return 0 if report.ok else 1


def _print(path: str, report: Report, as_json: bool, verdict: str) -> None:
    if as_json:
        print(report.to_json(indent=2))
        return
    print("\n".join([path, "", *render_report(report), ""]))
    for line in report.warnings:
        print(f"Note: {line}")
    for line in report.problems:
        print(f"Problem: {line}")
    print(verdict)


def render_report(report: Report) -> list[str]:
    """Lines of text: one per parameter's moments and per other tensor, then totals."""
    head = f"{'moments of':<{_NAME_WIDTH}}{'shape':>18} {'codec':>6} {'evidence':>8} {'coordinates':>12} {'escapes':>8}"
    head += f" {'stored':>7} {'bound':>8} {'steps':>7} {'at 100k':>8}"
    lines = [head]
    lines += [_parameter_line(name, one) for name, one in report.parameters.items()]
    if report.tensors:
        lines += ["", f"{'exact tensors':<{_NAME_WIDTH}}{'shape':>18} {'elements':>12} {'raw bytes':>14} {'stored':>7}"]
        lines += [_tensor_line(name, one) for name, one in report.tensors.items()]
    lines += ["", *_totals(report)]
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _share(one: Any) -> str:
    return f"{100 * one.ratio:.2f}%"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "none" if math.isinf(value) else f"{value:.5f}"


def _name(name: str) -> str:
    return name if len(name) < _NAME_WIDTH else "..." + name[-(_NAME_WIDTH - 4) :]


def _parameter_line(name: str, one: ParameterReport) -> str:
    steps = "-" if one.rounding_horizon is None else str(one.rounding_horizon)
    line = (
        f"{_name(name):<{_NAME_WIDTH}}{_shape(one.shape):>18} {one.codec:>6} {one.evidence:>8} {one.coordinates:>12,}"
    )
    line += f" {one.escapes:>8,} {_share(one):>7} {_number(one.certified_bound):>8} {steps:>7}"
    line += f" {_number(one.bound_at_100k):>8}"
    notes = [f"{cause} {count:,}" for cause, count in one.escapes_by_cause.items()]
    notes += [one.reason] if one.reason else []
    return line + (f"  ({', '.join(notes)})" if notes else "")


def _tensor_line(name: str, one: ParameterReport) -> str:
    # Tensors in a pack are compressed together: what one of them takes there is not known.
    line = f"{_name(name):<{_NAME_WIDTH}}{_shape(one.shape):>18} {one.coordinates:>12,} {one.raw_bytes:>14,}"
    line += f" {_share(one):>7}"
    return line + (f"  ({one.reason})" if one.reason else "")


def _totals(report: Report) -> list[str]:
    moments, exact = report.moments, report.exact
    causes = ", ".join(f"{cause} {count:,}" for cause, count in moments.escapes_by_cause.items()) or "none"
    lines = [
        f"moments  {moments.raw_bytes:>16,} raw {moments.stored_bytes:>16,} stored {_share(moments):>8}",
        f"exact    {exact.raw_bytes:>16,} raw {exact.stored_bytes:>16,} stored {_share(exact):>8}",
        f"escapes  {moments.escapes:,} of {moments.coordinates:,} coordinates ({causes})",
    ]
    if report.certified_bound is not None:
        lines += [
            f"bound    {report.certified_bound:.6f} lr, tolerance {report.tolerance}, horizon {report.horizon};"
            f" float32 rounding included up to step {report.rounding_horizon} after the save,",
            "         nothing is proved of later steps"
            if report.horizon != "all"
            else f"         {_number(report.bound_at_100k)} lr at step 100 000 after it",
        ]
    else:
        lines.append("bound    nothing is guarded: every moment is stored exactly")
    if report.failed_frames:
        lines.append(
            f"BUG      {report.failed_frames} coded frames failed their self-check and are exact: please report this"
        )
    return lines
