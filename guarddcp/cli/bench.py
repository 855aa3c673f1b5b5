"""``guarddcp bench codec``: bytes and speed of the ratio codec on real Adam states.

A state is a file of ``torch.save``: a dict with exp_avg and exp_avg_sq ({name: float32 tensor}), step, betas, eps,
weight_decay (decoupled) and lr. Sizes are those of real checkpoints written through `dcp.save`; speeds are ratios to a
copy of the same bytes in the same run, medians over alternating rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from guarddcp.certificate import Adam, certify
from guarddcp.cli.extremal import bound_over_attained
from guarddcp.codecs import ratio
from guarddcp.codecs.choice import choose_certificate, sample_frames, sample_q
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.predictors.rowcol import FrameFit
from guarddcp.codecs.view import Layout, default_view
from guarddcp.config import Guard
from guarddcp.errors import GuardError
from guarddcp.kernels.params import CoderParams

__all__ = ["measure_state", "run_bench_codec"]

TOLERANCES = (0.01, 0.05)
STATE_KEYS = ("exp_avg", "exp_avg_sq", "step", "betas", "eps", "weight_decay", "lr")
ROUNDS = 3
BOUND_HORIZONS: tuple[Any, ...] = (1, 60, "all")

State = dict[str, Any]


def run_bench_codec(files: list[str], *, as_json: bool) -> int:
    """Measure every state; a table on stdout, progress on stderr. Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for file in files or [_trained(folder)]:
            name = os.path.basename(file)
            results.append({"state": name, **measure_state(file, _teller(name))})
    outcome = {"machine": machine(), "states": results}
    print(json.dumps(outcome, indent=2) if as_json else "\n".join(render(outcome)))
    return 0


def _trained(folder: str) -> str:
    """Train the demo's GPT; returns the file of its state."""
    from guarddcp.cli.gpt import train_state

    _say("training the demo's GPT, 60 steps")
    torch.set_num_threads(os.cpu_count() or 1)
    state = train_state(
        60, progress=lambda step, loss: _say(f"  step {step} loss {loss:.3f}") if step % 10 == 0 else None
    )
    torch.save(state, file := os.path.join(folder, "gpt_60_steps.pt"))
    return file


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model or platform.processor(), "cores": cores, "torch": torch.__version__, "numpy": np.__version__}


def _teller(name: str) -> Callable[[str], None]:
    return lambda text: _say(f"{name}: {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_state(file: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that `bench codec` reports of one state file."""
    torch.set_num_threads(1)
    state: State = torch.load(file, weights_only=True)
    if missing := [key for key in STATE_KEYS if not isinstance(state, dict) or key not in state]:
        raise GuardError(
            "not a state file", where=file, expected=f"a dict with {', '.join(STATE_KEYS)}", got=f"no {missing}"
        )
    rule = Adam(betas=tuple(state["betas"]), eps=state["eps"], weight_decay=state["weight_decay"])
    pairs = [(state["exp_avg"][name].contiguous(), state["exp_avg_sq"][name].contiguous()) for name in state["exp_avg"]]
    found: dict[str, Any] = {
        "coordinates": sum(m.numel() for m, _ in pairs),
        "step": state["step"],
        "betas": list(rule.betas),
    }
    found["sizes"] = {}
    for tolerance in TOLERANCES:
        say(f"saving with tolerance {tolerance}")
        # In a fresh process: memory that an earlier save left behind would hide what this one takes.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found["sizes"][str(tolerance)] = process.submit(_saved_afresh, file, tolerance).result()
    say("timing encode and decode")
    found["speed"] = _speeds(pairs, rule, state["step"])
    say("extremal gradient sequences")
    found["bound_over_attained"] = {
        str(horizon): bound_over_attained(
            certify(rule, state["step"], tolerance=0.01, horizon=horizon, rounding_share=0.05, q_max=2.0)
        )
        for horizon in BOUND_HORIZONS
    }
    return found


# -- sizes and memory: a real save -------------------------------------------------------------------------------


def _saved_afresh(file: str, tolerance: float) -> dict[str, Any]:
    """Sizes and peak memory of a real save; runs in a process of its own."""
    torch.set_num_threads(1)
    state: State = torch.load(file, weights_only=True)
    names = list(state["exp_avg"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _saved(state, names[:1], tolerance)  # imports and compiled kernels are not memory of a save
        return _saved(state, names, tolerance)


def _saved(state: State, names: list[str], tolerance: float) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from guarddcp.dcp.writer import GuardedWriter

    step = torch.tensor(float(state["step"]))
    group = {
        "betas": tuple(state["betas"]), "eps": state["eps"], "weight_decay": state["weight_decay"], "lr": state["lr"],
        "amsgrad": False, "maximize": False, "decoupled_weight_decay": True, "params": names,
    }  # fmt: skip
    moments = {n: {"step": step, "exp_avg": state["exp_avg"][n], "exp_avg_sq": state["exp_avg_sq"][n]} for n in names}
    with tempfile.TemporaryDirectory() as folder:
        writer = GuardedWriter(os.path.join(folder, "checkpoint"), Guard(tolerance=tolerance))
        before = _reset_peak()
        dcp.save({"optim": {"state": moments, "param_groups": [group]}}, storage_writer=writer, no_dist=True)
        peak = _peak()
    report = writer.report
    assert report is not None
    return {
        "stored_over_raw": report.moments.ratio,
        "escapes": report.moments.escapes / max(report.moments.coordinates, 1),
        "guarded": report.moments.coordinates / sum(state["exp_avg"][n].numel() for n in names),
        "certified_bound": report.certified_bound,
        "rounding_horizon": report.rounding_horizon,
        "peak_extra_bytes": None if peak is None or before is None else peak - before,
    }


def _reset_peak() -> int | None:
    """Resident bytes now, after setting the peak counter back to them; None where Linux's counters are missing."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def _peak() -> int | None:
    return _status("VmHWM")


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return None


# -- speed -------------------------------------------------------------------------------------------------------


class _Pair:
    """One pair ready for timing: its frames as arrays."""

    def __init__(self, m: torch.Tensor, v: torch.Tensor) -> None:
        self.layout = Layout(tuple(m.shape), default_view(m.shape), ratio.FRAME_COORDINATES)
        shape = (self.layout.rows, self.layout.columns)
        self.m, self.v = m.numpy().reshape(shape), v.numpy().reshape(shape)

    def block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        frame = self.layout.frame(number)
        rows, columns = slice(frame.row, frame.row + frame.rows), slice(frame.column, frame.column + frame.columns)
        return self.m[rows, columns], self.v[rows, columns]

    def encode(self, rule: Adam, step: int, guard: Guard) -> _Encoded:
        """All of a save's work on one pair but the file: sample, certificate, fit, codes, self-check, compression."""
        sampled = [sample_q(*self.block(frame.number)) for frame in sample_frames(self.layout)]
        params = ratio.params_of(choose_certificate(np.concatenate(sampled), rule, step, guard))
        numbers = range(self.layout.num_frames)
        predictor = RowCol.combine(self.layout, [self.fit(n, params) for n in numbers], params)
        ratio.encode_side(predictor)
        frames = [self.encode_frame(n, predictor, params) for n in numbers]
        return _Encoded(self, params, predictor, frames)

    def fit(self, number: int, params: CoderParams) -> FrameFit:
        return RowCol.fit_frame(self.block(number)[1], self.layout.frame(number), self.layout, params)

    def encode_frame(self, number: int, predictor: RowCol, params: CoderParams) -> list[bytes]:
        terms = predictor.terms(self.layout.frame(number))
        return ratio.encode_frame(*self.block(number), terms, params).buffers


class _Encoded:
    def __init__(self, pair: _Pair, params: CoderParams, predictor: RowCol, frames: list[list[bytes]]) -> None:
        self.pair, self.params, self.predictor, self.frames = (
            pair,
            params,
            predictor,
            [b"".join(frame) for frame in frames],
        )

    def decode(self, buffer: np.ndarray) -> None:
        """Into a touched buffer, frame after frame, with code range and digest."""
        for number, data in enumerate(self.frames):
            frame = self.pair.layout.frame(number)
            n = frame.end - frame.begin
            m, v = (buffer[i * n : (i + 1) * n].reshape(frame.rows, frame.columns) for i in (0, 1))
            terms = self.predictor.terms(frame)
            ratio.decode_frame(memoryview(data), frame, terms, self.params, m, v, where="bench")


def _speeds(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Adam, step: int) -> dict[str, Any]:
    guard = Guard(tolerance=0.01)
    big = [_Pair(m, v) for m, v in pairs if m.numel() > 128]
    raw = sum(pair.m.nbytes + pair.v.nbytes for pair in big)
    encoded = [pair.encode(rule, step, guard) for pair in big]  # compiles and warms
    target = np.ones(raw // 4, np.float32)
    scratch = np.ones(2 * ratio.FRAME_COORDINATES, np.float32)
    times: dict[str, list[float]] = {"copy": [], "encode": [], "decode": [], "encode1": [], "encode2": []}
    for _ in range(ROUNDS):
        times["copy"].append(_timed(lambda: _copy(big, target)))
        times["encode"].append(_timed(partial(_encode_all, big, rule, step, guard)))
        times["decode"].append(_timed(lambda: _decode_all(encoded, scratch)))
        for threads in (1, 2):
            times[f"encode{threads}"].append(_timed(partial(_encode_on_threads, encoded, threads)))
    copy, one, two = times["copy"], times["encode1"], times["encode2"]
    return {
        "raw_bytes": raw,
        "copy_seconds": statistics.median(copy),
        "encode_seconds": statistics.median(times["encode"]),
        "decode_seconds": statistics.median(times["decode"]),
        "encode_over_copy": _ratio(copy, times["encode"]),
        "decode_over_copy": _ratio(copy, times["decode"]),
        "two_threads_over_one": _ratio(one, two),
    }


def _encode_all(pairs: list[_Pair], rule: Adam, step: int, guard: Guard) -> None:
    for pair in pairs:
        pair.encode(rule, step, guard)


def _decode_all(encoded: list[_Encoded], buffer: np.ndarray) -> None:
    for one in encoded:
        one.decode(buffer)


def _ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b: how many times faster b is than a."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _timed(job: Callable[[], object]) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


def _copy(pairs: list[_Pair], target: np.ndarray) -> None:
    at = 0
    for pair in pairs:
        for array in (pair.m, pair.v):
            np.copyto(target[at : at + array.size], array.reshape(-1))
            at += array.size


def _encode_on_threads(encoded: list[_Encoded], threads: int) -> None:
    from guarddcp.dcp.pipeline import OrderedPool

    with OrderedPool(threads) as pool:
        for one in encoded:
            for number in range(one.pair.layout.num_frames):
                pool.submit(partial(one.pair.encode_frame, number, one.predictor, one.params), lambda _: None)
        pool.drain()


# -- table -------------------------------------------------------------------------------------------------------


def render(outcome: dict[str, Any]) -> list[str]:
    """The outcome as lines of text."""
    about = outcome["machine"]
    lines = [f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, numpy {about['numpy']}"]
    for state in outcome["states"]:
        speed = state["speed"]
        lines += [
            "",
            f"{state['state']}: {state['coordinates']:,} coordinates, step {state['step']}, betas {state['betas']}",
        ]
        for tolerance, size in state["sizes"].items():
            lines.append(
                f"  tolerance {tolerance}: stored / raw {100 * size['stored_over_raw']:.2f} %, "
                f"escapes {100 * size['escapes']:.3f} %, guarded {100 * size['guarded']:.2f} %, "
                f"peak extra memory of the save {_mib(size['peak_extra_bytes'])}"
            )
        lines += [
            f"  encode with self-check, one thread / copy: {speed['encode_over_copy']:.3f}   "
            f"({speed['raw_bytes'] / speed['encode_seconds'] / 1e9:.2f} GB/s of raw moments)",
            f"  decode with full verification, one thread / copy: {speed['decode_over_copy']:.3f}   "
            f"({speed['raw_bytes'] / speed['decode_seconds'] / 1e9:.2f} GB/s)",
            f"  two threads over one: {speed['two_threads_over_one']:.2f}",
            "  certified bound, rounding aside, / deviation reached: "
            + ", ".join(f"horizon {h}: {x:.5f}" for h, x in state["bound_over_attained"].items()),
        ]
    return lines


def _mib(size: int | None) -> str:
    return "not known here" if size is None else f"{size / 2**20:.0f} MiB"
