"""What the demo's ranks do: train and save on one group, restore and continue on another.

These functions run inside ``run_ranks``; what they take and return is plain and picklable. *Native* is the run that
was restored from a plain DCP checkpoint, bit for bit; *restored* is the one from the certified checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from guarddcp import Guard, GuardedReader, GuardedWriter, Report
from guarddcp.cli.gpt import GPT, SIZES, Batches, adamw, load_corpus, loss_of, param_groups
from guarddcp.cli.probe import Deviation, UpdateProbe, compare_updates, local
from guarddcp.cli.ranks import Say

__all__ = ["Distance", "Job", "Resumed", "Saved", "ready", "resume", "train_and_save"]

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job: ``steps`` >= 1 before the save, ``more`` >= 1 steps after the restore."""

    certified: str
    plain: str
    size: str = "demo"
    steps: int = 120
    more: int = 50
    seed: int = 0
    lr: float = 5e-4
    guard: Guard


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the training ranks report (rank 0's is whole). ``sizes`` in bytes and coordinates."""

    parameters: int
    first_loss: float
    last_loss: float
    seconds: dict[str, float]
    sizes: dict[str, int]
    certified_bound: float | None
    rounding_horizon: int | None
    bound_at_100k: float | None
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Between two sets of parameters, over all of them."""

    largest: float
    rms: float


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a rank of a resumed job reports; ``deviations`` has one entry per common step."""

    differing: list[str]
    digests: dict[str, str]
    deviations: list[Deviation]
    native_losses: list[float]
    restored_losses: list[float]
    distance: Distance
    travelled: Distance
    certified_bound: float | None
    seconds: dict[str, float]


class Run:
    """A sharded model with its optimizer and its data."""

    def __init__(self, job: Job) -> None:
        size = SIZES[job.size]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(job.seed)
        self.model = GPT(size)
        mesh = init_device_mesh("cpu", (self.ranks,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(param_groups(self.model), lr=job.lr, fused=True)
        self.batches = Batches(load_corpus(), block=size.block, windows=size.windows, seed=job.seed)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; tensors are this run's own, so ``dcp.load`` fills them in place."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "progress": {"step": self.step}}

    def load(self, reader: StorageReader) -> None:
        """Restore from a checkpoint of any number of ranks."""
        state = self.state_dict()
        dcp.load(state, storage_reader=reader)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["progress"]["step"]

    def backward(self) -> float:
        """Gradients of this step's batch; returns the loss over the batches of all ranks."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.batches(self.step, self.rank, self.ranks))
        loss.backward()
        mean = loss.detach() / self.ranks
        dist.all_reduce(mean)
        return mean.item()

    def update(self) -> None:
        """One optimizer step with the gradients at hand."""
        self.optimizer.step()
        self.step += 1

    def weights(self) -> list[Tensor]:
        """Local shards, in the order of the optimizer's groups."""
        return [local(weight) for group in self.optimizer.param_groups for weight in group["params"]]

    def gradients(self) -> list[Tensor]:
        """Local shards of the gradients, in the same order."""
        return [local(weight.grad) for group in self.optimizer.param_groups for weight in group["params"]]


def train_and_save(say: Say, job: Job) -> Saved:
    """Train ``job.steps`` steps, then save the same state certified and as a plain DCP checkpoint."""
    clock = Clock()
    run = Run(job)
    clock("start")
    losses = []
    for _ in range(job.steps):
        losses.append(run.backward())
        run.update()
        if run.rank == 0:
            say(("train", run.step, job.steps, losses[-1]))
    clock("train")
    state = run.state_dict()
    writer = GuardedWriter(job.certified, job.guard)
    dcp.save(state, storage_writer=writer)
    clock("save certified")
    dcp.save(state, storage_writer=FileSystemWriter(job.plain))
    clock("save plain")
    report = writer.report
    assert report is not None
    return Saved(
        parameters=sum(weight.numel() for weight in run.model.parameters()),
        first_loss=losses[0],
        last_loss=losses[-1],
        seconds=clock.seconds,
        sizes=sizes_of(report),
        certified_bound=report.certified_bound,
        rounding_horizon=report.rounding_horizon,
        bound_at_100k=report.bound_at_100k,
        warnings=report.warnings,
    )


def sizes_of(report: Report) -> dict[str, int]:
    """Raw and stored bytes of the guarded moments, the model's tensors and all that is stored exactly."""
    model = [tensor for key, tensor in report.tensors.items() if key.startswith("model.")]
    return {
        "moments_raw": report.moments.raw_bytes,
        "moments_stored": report.moments.stored_bytes,
        "weights_raw": sum(tensor.raw_bytes for tensor in model),
        "weights_stored": sum(tensor.stored_bytes for tensor in model),
        "exact_raw": report.exact.raw_bytes,
        "exact_stored": report.exact.stored_bytes,
        "coordinates": report.moments.coordinates,
        "escapes": report.moments.escapes,
    }


def ready(say: Say) -> None:
    """Does nothing: the first rank to run waits for imports and for kernels that are not compiled yet."""


def resume(say: Say, job: Job, more: int) -> Resumed:
    """Restore both checkpoints here, compare them, and continue both runs by ``more`` >= 1 steps on the same data."""
    clock = Clock()
    native, restored = Run(job), Run(job)
    clock("start")
    native.load(FileSystemReader(job.plain))
    clock("load plain")
    reader = GuardedReader(job.certified)
    restored.load(reader)
    clock("load certified")
    assert reader.report is not None
    differing = differing_leaves(native.state_dict(), restored.state_dict())
    digests = moment_digests(restored.state_dict())
    origin = [weight.clone() for weight in native.weights()]
    deviations, native_losses = continue_native(say, native, restored, more)
    restored_losses = []
    for _ in range(more):
        restored_losses.append(restored.backward())
        restored.update()
        if restored.rank == 0:
            say(("continue restored", len(restored_losses), more, restored_losses[-1]))
    clock("continue")
    return Resumed(
        differing=differing,
        digests=digests,
        deviations=deviations,
        native_losses=native_losses,
        restored_losses=restored_losses,
        distance=distance(native.weights(), restored.weights()),
        travelled=distance(native.weights(), origin),
        certified_bound=reader.report.certified_bound,
        seconds=clock.seconds,
    )


def continue_native(say: Say, native: Run, restored: Run, more: int) -> tuple[list[Deviation], list[float]]:
    """Continue the native run, and feed its gradients to copies of both optimizer states.

    That is what the promise speaks of: the same gradients, now and at every later step. The runs themselves see
    different gradients as soon as their parameters differ.
    """
    probes = UpdateProbe(native.optimizer), UpdateProbe(restored.optimizer)
    deviations, losses = [], []
    for _ in range(more):
        losses.append(native.backward())
        gradients = native.gradients()
        deviations.append(compare_updates(probes[0].step(gradients), probes[1].step(gradients)))
        native.update()
        if native.rank == 0:
            say(("continue native", len(losses), more, losses[-1]))
    return deviations, losses


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted path, leaf) of nested dicts and lists."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from leaves(value, f"{path}.{position}")
    else:
        yield path, tree


def differing_leaves(native: dict[str, Any], restored: dict[str, Any]) -> list[str]:
    """Names, moments aside, whose local values are not the same bits (tensors) or not equal (plain values)."""
    theirs = dict(leaves(restored))
    different = []
    for name, value in leaves(native):
        if name.endswith(MOMENTS):
            continue
        other = theirs[name]
        same = same_bits(local(value), local(other)) if isinstance(value, Tensor) else value == other
        if not same:
            different.append(name)
    return different


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of dtype, shape and bytes (so NaN equals itself, and zeros of different sign differ)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def moment_digests(state: dict[str, Any]) -> dict[str, str]:
    """A digest of each whole moment tensor by name: the same on any number of ranks. Collective."""
    digests = {}
    for name, value in leaves(state):
        if name.endswith(MOMENTS):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digests[name] = hashlib.blake2b(whole.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    return digests


def distance(one: list[Tensor], other: list[Tensor]) -> Distance:
    """Largest and RMS difference of two lists of local shards over all ranks. Collective."""
    gaps = torch.cat([(a - b).flatten() for a, b in zip(one, other, strict=True)]).double()
    largest = torch.cat([gaps.abs(), torch.zeros(1)]).max()
    sums = torch.stack([gaps.square().sum(), torch.tensor(float(gaps.numel()))])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return Distance(largest=largest.item(), rms=(sums[0] / sums[1]).sqrt().item())


class Clock:
    """Wall time by phase: calling it with a name ends the phase of that name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
