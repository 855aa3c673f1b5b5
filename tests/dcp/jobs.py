"""Training jobs that tests run on forked ranks: a small model, its optimizer, state dicts, full copies of them."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
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
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    return dump(full(states(model, optimizer, options) | {"extra": state["extra"]}))


def barrier(rank: int, world: int) -> None:
    dist.barrier()
