"""The update that an optimizer state makes of given gradients, in units of the learning rate.

A parameter hides its update: float32 keeps a weight near 1 only to 6e-8, which at a learning rate of 1e-3 is half a
percent of a tolerance of 0.01. So the moments are copied behind parameters that are exactly zero and a real
``torch.optim`` optimizer steps those: what it adds to zero is the update itself, and weight decay decays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Deviation", "UpdateProbe", "compare_updates", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, detached; a plain tensor as it is, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class UpdateProbe:
    """A copy of an optimizer's state whose updates can be read.

    ``optimizer`` is a ``torch.optim`` optimizer whose every parameter has a state; the probe has its class, its groups'
    settings and copies of its local state tensors, and never touches it again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups: list[dict[str, Any]] = []
        state: dict[Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            zeros = [torch.zeros_like(local(weight)) for weight in group["params"]]
            groups.append({**group, "params": zeros})
            for weight, zero in zip(group["params"], zeros, strict=True):
                state[zero] = {
                    key: local(value).clone() if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[weight].items()
                }
        # The groups hold every setting, so the class's defaults do not matter.
        self._optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        self._optimizer.state.update(state)

    def step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take one optimizer step; the updates in units of lr, float64, one per gradient.

        ``gradients`` are local shards in the order of the groups' parameters.
        """
        updates = []
        with torch.no_grad():
            for zero, gradient in zip(self._weights(), gradients, strict=True):
                zero.zero_()
                zero.grad = gradient
            self._optimizer.step()
            for group in self._optimizer.param_groups:
                updates += [zero.double().neg() / float(group["lr"]) for zero in group["params"]]
        return updates

    def _weights(self) -> list[Tensor]:
        return [zero for group in self._optimizer.param_groups for zero in group["params"]]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far two updates of the same gradients lie apart, over all coordinates of all ranks, in units of lr."""

    largest: float
    rms: float
    rms_update: float


def compare_updates(native: Sequence[Tensor], restored: Sequence[Tensor]) -> Deviation:
    """Compare two lists of local float64 updates; collective, the same answer on every rank."""
    largest, squares, update_squares, count = 0.0, 0.0, 0.0, 0
    for one, other in zip(native, restored, strict=True):
        if one.numel() == 0:
            continue
        apart = one - other
        # A NaN anywhere is the largest deviation there is; max() of floats and of gloo could lose it.
        largest = max(largest, float(apart.abs().nan_to_num(nan=math.inf).max()))
        squares += float(apart.square().sum())
        update_squares += float(one.square().sum())
        count += one.numel()
    sums = torch.tensor([squares, update_squares, float(count)], dtype=torch.float64)
    most_of_all = torch.tensor(largest, dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(most_of_all, op=dist.ReduceOp.MAX)
    squares, update_squares, total = sums.tolist()
    return Deviation(
        largest=float(most_of_all), rms=(squares / total) ** 0.5, rms_update=(update_squares / total) ** 0.5
    )
