"""What the tests of pairing and of optimizer lookup share: jobs on meshes, a storage in memory, a bare planner."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.futures import Future

from guarddcp.dcp.pairing import PairItem, check_coverage, fold_pairs, unfold_metadata

MESHES = ("ddp", "fsdp", "hsdp", "tp_fsdp")
LAYOUTS = ("nested", "flat", "int")


class MemoryWriter(StorageWriter):
    """The hooks of pairing and nothing else. Tensors travel in the results and end in ``metadata.storage_data``."""

    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_writer(self, is_coordinator):
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return fold_pairs(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = [self.report()]
        for item in fold_pairs(plan).items:  # again: a plan cached by another writer has no pairs
            together = isinstance(item, PairItem)
            for member in item.members if together else (item,):
                data = planner.resolve_data(member)
                if isinstance(data, torch.Tensor):
                    assert data.shape == member.tensor_data.chunk.sizes
                    data = data.detach().clone()
                results.append(WriteResult(member.index, 0, (dist.get_rank(), together, data)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def report(self) -> Any:
        return {"rank": dist.get_rank()}  # results may hold more than WriteResults

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        unfold_metadata(metadata)
        check_coverage(metadata, results)
        metadata.storage_data = {
            r.index: r.storage_data for of_rank in results for r in of_rank if not isinstance(r, dict)
        }

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


class MemoryReader(StorageReader):
    """Reads back from the Metadata that a save with MemoryWriter returned."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    def reset(self, checkpoint_id=None):
        pass

    def read_metadata(self) -> Metadata:
        return copy.copy(self.metadata)

    def set_up_storage_reader(self, metadata, is_coordinator):
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner) -> Future[None]:
        for item in plan.items:
            data = self.metadata.storage_data[item.storage_index][2]
            if item.type == LoadItemType.BYTE_IO:
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            target = planner.resolve_tensor(item)
            for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                data = data.narrow(dim, begin, length)
            target.detach().copy_(data)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


class BarePlanner(SavePlanner):
    """Only what SavePlanner demands: no state_dict, no mappings to look into."""

    def __init__(self) -> None:
        self._inner = DefaultSavePlanner()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self._inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans):
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem):
        return self._inner.resolve_data(write_item)


class Net(nn.Module):
    """Two layers, one of them under a name that holds ".state."; uneven over 2 ranks, biases of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.state = nn.ModuleDict({"state": nn.Linear(6, 4)})

    def names(self) -> set[str]:
        return {name for name, _ in self.named_parameters()}


def make_job(mesh_kind: str, **hyper: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on 4 ranks in one of MESHES and its AdamW after two steps, with the same values on all meshes."""
    torch.manual_seed(1)
    model = Net()
    if mesh_kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif mesh_kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    elif mesh_kind == "tp_fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "state.state": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **hyper)
    take_steps(optimizer, 2)
    return model, optimizer


def take_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Steps with made-up gradients for all parameters that want one."""
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = param.detach() * 0.5 + 0.1
        optimizer.step()


def optimizer_dict(model: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> dict[str, Any]:
    """The optimizer's state dict in one of LAYOUTS."""
    if layout == "int":
        return optimizer.state_dict()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    return get_optimizer_state_dict(model, optimizer, options=options)


def local(value: Any) -> list[torch.Tensor]:
    """The tensors that this rank holds of a tensor of any kind."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
