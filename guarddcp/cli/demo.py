"""``guarddcp demo``: the promise, shown on a real training run on this machine.

Two ranks train a small GPT with FSDP2 and save it certified and, for comparison, with plain DCP. Three ranks and then
one restore both. What follows is measured: the next update and every later one on the same gradients, in units of
the learning rate; the losses of both runs when they go on for themselves; and the sizes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from guarddcp.cli.ranks import run_ranks, start_server
from guarddcp.config import Guard
from guarddcp.errors import CheckpointExistsError
from guarddcp.report import Report

if TYPE_CHECKING:
    from guarddcp.cli.job import Distance, Job, Resumed, Saved
    from guarddcp.cli.probe import Deviation

__all__ = ["Outcome", "run_demo"]

SAVE_RANKS, MANY_RANKS = 2, 3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that the demo measured; lengths in bytes, times in seconds, deviations in units of lr."""

    job: Job
    saved: Saved
    many: list[Resumed]
    one: Resumed
    verified: Report
    plain_bytes: int
    certified_bytes: int
    seconds: dict[str, float]

    @property
    def next_step(self) -> Deviation:
        """The first update after the restore, on 3 ranks."""
        return self.many[0].deviations[0]

    @property
    def promised(self) -> int:
        """How many of the common steps the certificates speak of (all, unless the horizon is shorter)."""
        return min(self.job.more, self.saved.rounding_horizon or self.job.more)

    @property
    def later(self) -> float:
        """Largest deviation of any promised update on the same gradients, over both restores."""
        return max(each.largest for each in self.many[0].deviations[: self.promised] + self.one.deviations)

    def violations(self) -> list[str]:
        """What of the promise does not hold; empty if all of it does."""
        found = []
        differing = sorted({name for rank in [*self.many, self.one] for name in rank.differing})
        if differing:
            found.append(f"{len(differing)} values besides the moments were not restored bit for bit: {differing[:3]}")
        if self.one.digests != self.many[0].digests:
            found.append(f"1 rank and {MANY_RANKS} ranks restored different moments")
        if not self.later <= self.job.guard.tolerance:
            found.append(f"an update deviates by {self.later:.6g} lr, the tolerance is {self.job.guard.tolerance:g} lr")
        for where, bound in (("save", self.saved.certified_bound), ("restore", self.many[0].certified_bound)):
            if bound is not None and not bound <= self.job.guard.tolerance:
                found.append(f"the {where} certifies {bound:.6g} lr, the tolerance is {self.job.guard.tolerance:g} lr")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        many, sizes = self.many[0], self.saved.sizes
        return {
            "parameters": self.saved.parameters,
            "steps": self.job.steps,
            "more_steps": self.job.more,
            "tolerance": self.job.guard.tolerance,
            "certified_bound": many.certified_bound,
            "rounding_horizon": self.saved.rounding_horizon,
            "bound_at_100k": _finite(self.saved.bound_at_100k),
            "next_step": dataclasses.asdict(self.next_step),
            "next_step_one_rank": dataclasses.asdict(self.one.deviations[0]),
            "promised_steps": self.promised,
            "largest_of_promised_steps": self.later,
            "loss": {"native": many.native_losses, "restored": many.restored_losses},
            "parameter_distance": dataclasses.asdict(many.distance),
            "parameter_travel": dataclasses.asdict(many.travelled),
            "lr": self.job.lr,
            "bytes": {**sizes, "plain_total": self.plain_bytes, "certified_total": self.certified_bytes},
            "verified": {
                "certificates": self.verified.certificates,
                "certified_bound": self.verified.certified_bound,
                "problems": self.verified.problems,
            },
            "warnings": self.saved.warnings,
            "seconds": self.seconds,
            "violations": self.violations(),
        }


def run_demo(*, guard: Guard, keep: str | None, steps: int, more: int, size: str, as_json: bool) -> int:
    """Run the demo; progress on stderr, the result on stdout. Returns the exit code: 0, or 1 for a broken promise.

    ``keep`` is the folder for both checkpoints (a temporary one if None); raises CheckpointExistsError before any work
    if it holds some already.
    """
    with _folder(keep) as folder:
        outcome = _measure(folder, guard, steps, more, size, Progress(sys.stderr))
    if as_json:
        print(json.dumps(outcome.as_dict(), indent=2))
    else:
        print("\n".join(render(outcome, keep)))
    return 1 if outcome.violations() else 0


def _measure(folder: Path, guard: Guard, steps: int, more: int, size: str, progress: Progress) -> Outcome:
    seconds: dict[str, float] = {}
    with progress.phase("import torch, compile kernels if this is the first time", seconds):
        start_server()  # imports in its process while the next lines import in this one
        from guarddcp import verify
        from guarddcp.cli.job import Job, ready, resume, train_and_save

        run_ranks(1, ready)
    job = Job(
        certified=str(folder / "certified"),
        plain=str(folder / "plain"),
        size=size,
        steps=steps,
        more=more,
        guard=guard,
    )
    with progress.phase(f"train and save on {SAVE_RANKS} ranks", seconds):
        saved = run_ranks(SAVE_RANKS, train_and_save, job, on_message=progress)[0]
    with progress.phase("verify", seconds):
        verified = verify(job.certified)
    with progress.phase(f"restore and continue on {MANY_RANKS} ranks", seconds):
        many = run_ranks(MANY_RANKS, resume, job, job.more, on_message=progress)
    with progress.phase("restore on 1 rank", seconds):
        one = run_ranks(1, resume, job, 1, on_message=progress)[0]
    return Outcome(
        job=job,
        saved=saved,
        many=many,
        one=one,
        verified=verified,
        plain_bytes=_folder_bytes(job.plain),
        certified_bytes=_folder_bytes(job.certified),
        seconds=seconds,
    )


def render(outcome: Outcome, keep: str | None) -> list[str]:
    """The result as lines of plain text, at most 80 columns wide."""
    job, saved, many, sizes = outcome.job, outcome.saved, outcome.many[0], outcome.saved.sizes
    step, lr = outcome.next_step, job.lr
    loss = f"loss {saved.first_loss:.4f} -> {saved.last_loss:.4f}"
    rest = "DIFFER" if any(rank.differing for rank in [*outcome.many, outcome.one]) else "bit for bit"
    verified = outcome.verified
    rows = [
        "",
        f"guarddcp demo: byte-level GPT of {saved.parameters:,} parameters, FSDP2 and AdamW on gloo",
        "",
        f"  trained on {SAVE_RANKS} ranks, saved at step {job.steps}, {loss}",
        f"  restored on {MANY_RANKS} ranks and on 1: weights, steps and settings {rest}",
        f"  verified without the model: {verified.certificates} certificates, {len(verified.problems)} problems",
        "",
        f"{'Size in bytes':<36}{'plain DCP':>14}{'guarddcp':>14}{'share':>9}",
        _size_row("Adam moments, guarded", sizes["moments_raw"], sizes["moments_stored"]),
        _size_row("weights, exact", sizes["weights_raw"], sizes["weights_stored"]),
        _size_row("whole checkpoint on disk", outcome.plain_bytes, outcome.certified_bytes),
        f"  {sizes['escapes']:,} of {sizes['coordinates']:,} guarded coordinates escaped (are stored exactly)",
        "",
        "The same gradients, native against restored: update in units of lr",
        _value_row("tolerance", job.guard.tolerance),
        *_bound_rows(saved, many),
        _value_row(f"step {job.steps + 1}: largest deviation", step.largest),
        _value_row(f"step {job.steps + 1}: RMS deviation", step.rms),
        _value_row(f"step {job.steps + 1}: RMS of the update itself", step.rms_update),
        _value_row(f"steps {job.steps + 1} to {job.steps + outcome.promised}: largest deviation", outcome.later),
        "",
        f"{'Each run on its own gradients':<45}{'native':>14}{'restored':>14}",
        _loss_row(job.steps + 1, many, 0),
        _loss_row(job.steps + job.more, many, -1),
        f"{'Parameters after that, in units of lr':<45}{'largest':>14}{'RMS':>14}",
        _distance_row("distance between the runs", many.distance, lr),
        _distance_row("distance of the native run from the save", many.travelled, lr),
        "",
    ]
    rows += [f"Note: {line}" for line in saved.warnings]
    if keep is not None:
        rows += [f"Both checkpoints are kept in {keep}. Look inside:", f"  guarddcp inspect {job.certified}", ""]
    return rows + _verdict(outcome)


def _verdict(outcome: Outcome) -> list[str]:
    violations = outcome.violations()
    if violations:
        return [f"PROMISE BROKEN: {text}" for text in violations]
    allowed = outcome.job.guard.tolerance
    return [f"Promise kept: no update deviates by more than {outcome.later:.4g} lr, {allowed:g} lr allowed."]


def _bound_rows(saved: Saved, resumed: Resumed) -> list[str]:
    if resumed.certified_bound is None:
        return ["  nothing could be guarded: every moment is stored exactly"]
    rows = [_value_row("certified bound, proved again by the restore", resumed.certified_bound)]
    if saved.rounding_horizon is not None:
        far = _finite(saved.bound_at_100k)
        after = "nothing is promised after them" if far is None else f"{far:.4f} at step 100,000"
        rows.append(f"    float32 rounding included for {saved.rounding_horizon:,} steps, {after}")
    return rows


def _finite(bound: float | None) -> float | None:
    return None if bound is None or math.isinf(bound) else bound


def _size_row(name: str, raw: int, stored: int) -> str:
    return f"  {name:<34}{raw:>14,}{stored:>14,}{f'{stored / raw:.1%}' if raw else '-':>9}"


def _value_row(name: str, value: float) -> str:
    return f"  {name:<57}{value:>14.7f}"


def _distance_row(name: str, distance: Distance, lr: float) -> str:
    return f"  {name:<43}{distance.largest / lr:>14.4f}{distance.rms / lr:>14.4f}"


def _loss_row(step: int, resumed: Resumed, position: int) -> str:
    losses = resumed.native_losses[position], resumed.restored_losses[position]
    return f"  {f'loss at step {step}':<43}{losses[0]:>14.6f}{losses[1]:>14.6f}"


class Progress:
    """Shows where the demo is: one line that is rewritten on a terminal, a line every few seconds elsewhere."""

    def __init__(self, stream: TextIO, every: float = 5.0) -> None:
        self._stream, self._tty = stream, stream.isatty()
        self._every = 0.1 if self._tty else every
        self._last = -self._every

    def __call__(self, message: object) -> None:
        """Show a rank's (what, done, of, loss)."""
        assert isinstance(message, tuple)
        what, done, of, loss = message
        now = time.monotonic()
        if done == of or now - self._last >= self._every:
            self._last = now
            self._show(f"  {what}: step {done} of {of}, loss {loss:.4f}", ended=False)

    @contextmanager
    def phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Announce a phase, time it into ``seconds[name]`` and say how long it took."""
        start = time.perf_counter()
        self._show(f"  {name} ...", ended=False)
        try:
            yield
        except BaseException:
            self._show(f"{name}: failed", ended=True)
            raise
        seconds[name] = time.perf_counter() - start
        self._show(f"{name}: {seconds[name]:.1f} s", ended=True)

    def _show(self, text: str, *, ended: bool) -> None:
        if self._tty:
            print(f"\r{text:<79}", end="\n" if ended else "", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """The folder of the checkpoints: ``keep``, made if need be, or one that is removed at the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="guarddcp-demo-") as name:
            yield Path(name)
        return
    for name in ("certified", "plain"):
        if (Path(keep) / name).exists():
            raise CheckpointExistsError(
                "the demo overwrites nothing", where=str(Path(keep) / name), hint="Choose another folder for --keep."
            )
    Path(keep).mkdir(parents=True, exist_ok=True)
    yield Path(keep)


def _folder_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
