"""Training jobs that tests run on forked ranks or alone: models, optimizers, round trips, exact comparison."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from guarddcp import GuardedReader, GuardedWriter

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()


class Net(nn.Module):
    """Odd sizes, so that shards are uneven and one parameter has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 24)
        self.up = nn.Linear(24, 62)
        self.down = nn.Linear(62, 24)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(h + self.down(torch.tanh(self.up(h))))


def build(world: int, mesh_kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``mesh_kind``: ddp, fsdp, hsdp (2 x n), tp (2 x n: tensor parallel inside fsdp)."""
    torch.manual_seed(seed)
    model = Net()
    if mesh_kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif mesh_kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif mesh_kind == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randint(0, 29, (4, 7), generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    msd, osd = get_state_dict(model, optimizer, options=options)
    return {"model": msd, "optim": osd, "extra": {"epoch": 3, "note": ("a", 1.5)}}


def full(value: Any) -> Any:
    """Every DTensor gathered, everything cloned: plain tensors that can leave the rank."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full(item) for item in value)
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def dump(value: Any) -> bytes:
    """For the way out of a rank: sharing tensor memory would need the rank to stay alive."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def undump(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def save(rank: int, world: int, path: str, mesh_kind: str, flat: bool, writer: dict[str, Any]) -> tuple[bytes, Any]:
    """Train, save; returns (full state, report as dict)."""
    model, optimizer = build(world, mesh_kind, seed=0)
    train(model, optimizer, 4)
    state = states(model, optimizer, FLAT if flat else NESTED)
    metadata = dcp.save(state, storage_writer=GuardedWriter(path, **writer))
    return dump(full(state)), metadata.guard_report.to_dict()


def load(rank: int, world: int, path: str, mesh_kind: str, flat: bool, reader: dict[str, Any]) -> bytes:
    """Load into a model of another seed; returns the full state as the optimizer and model then hold it."""
    options = FLAT if flat else NESTED
    model, optimizer = build(world, mesh_kind, seed=1)
    state = states(model, optimizer, options)
    state["extra"] = {"epoch": 0, "note": None}
    dcp.load(state, storage_reader=GuardedReader(path, **reader))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    return dump(full(states(model, optimizer, options) | {"extra": state["extra"]}))


def barrier(rank: int, world: int) -> None:
    dist.barrier()


# ---- without a process group, or on each rank


def adam(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    steps: int = 3,
    shapes: tuple[tuple[int, ...], ...] = ((40, 40), (200,)),
    groups: list[dict[str, Any]] | None = None,
    dtype: torch.dtype = torch.float32,
    **hyper: Any,
) -> torch.optim.Optimizer:
    """An optimizer after some steps on made-up gradients, each row on a scale of its own. ``groups``: one per shape."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    members: Any = parameters
    if groups is not None:
        members = [{"params": [p], **group} for p, group in zip(parameters, groups, strict=True)]
    optimizer = kind(members, **({"lr": 1e-3} | hyper))
    for _ in range(steps):
        for p in parameters:
            scales = 10.0 ** torch.randn((p.shape[0], *[1] * (p.ndim - 1)), generator=generator)
            p.grad = (torch.randn(p.shape, generator=generator) * scales).to(dtype)
        optimizer.step()
    return optimizer


def blank(tree: Any) -> Any:
    """The same tree with zeros in every tensor and None for every other value."""
    if isinstance(tree, dict):
        return {key: blank(item) for key, item in tree.items()}
    if isinstance(tree, list) and any(isinstance(item, dict | torch.Tensor) for item in tree):
        return [blank(item) for item in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def bits(tensor: torch.Tensor) -> bytes:
    """Elements in row-major order, for comparisons that NaN and -0.0 pass."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, expected: Any, where: str = "$") -> None:
    """Equal types, dtypes, shapes and bits, all the way down."""
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        assert bits(got) == bits(expected), where
        return
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_same(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert repr(got) == repr(expected), where


def round_trip(state: Any, path: Any, *, target: Any = None, writer: Any = None, reader: Any = None) -> tuple[Any, Any]:
    """Save and load into ``target`` (zeros by default); returns (loaded, report of the save)."""
    metadata = dcp.save(state, storage_writer=GuardedWriter(path, **(writer or {})))
    loaded = blank(state) if target is None else target
    dcp.load(loaded, storage_reader=GuardedReader(path, **(reader or {})))
    return loaded, metadata.guard_report


def said(caplog: Any) -> list[str]:
    """The warnings of guarddcp (DCP logs every hook besides)."""
    return [r.getMessage() for r in caplog.records if r.name == "guarddcp" and r.levelname == "WARNING"]


def failures(call: Any, *args: Any, **kwargs: Any) -> list[BaseException]:
    """The errors by rank inside the CheckpointException that ``call`` must raise."""
    try:
        call(*args, **kwargs)
    except CheckpointException as error:
        return [failure for failure, _ in error.failures.values()]
    raise AssertionError("it went through")


def failure(call: Any, *args: Any, **kwargs: Any) -> BaseException:
    """As `failures` where one rank fails."""
    (error,) = failures(call, *args, **kwargs)
    return error


def update_gap(saved: dict[str, Any], loaded: dict[str, Any], kind: type[torch.optim.Optimizer]) -> float:
    """Largest difference, in units of lr, of the next update from two state dicts on common gradients."""
    moments = saved["state"]
    gaps = []
    for scale in (0.0, 0.3, 1.0, 3.0):
        gradients = {number: scale * entry["exp_avg_sq"].sqrt() for number, entry in moments.items()}
        native, restored = (_updates(state, gradients, kind) for state in (saved, loaded))
        gaps += [float((native[number] - restored[number]).abs().max()) for number in moments]
    return max(gaps)


def _updates(state: dict[str, Any], gradients: dict[int, torch.Tensor], kind: Any) -> dict[int, torch.Tensor]:
    zeros = {number: nn.Parameter(torch.zeros_like(gradient)) for number, gradient in gradients.items()}
    optimizer = kind([{"params": [zeros[number] for number in group["params"]]} for group in state["param_groups"]])
    optimizer.load_state_dict(copy.deepcopy(state))  # the optimizer would go on with these very tensors
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for number, p in zeros.items():
        p.grad = gradients[number]
    optimizer.step()
    return {number: p.detach() for number, p in zeros.items()}
