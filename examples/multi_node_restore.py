r"""Restore a checkpoint of ``fsdp2_train_and_resume.py`` with torchrun on other machines and another number of ranks.

On one machine:

    torchrun --nproc-per-node 4 examples/multi_node_restore.py /tmp/run/step-40

On two, with the checkpoint where both can read it (a shared folder or a bucket); the same line on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/multi_node_restore.py s3://bucket/run/step-40 --storage-options '{"endpoint_url": "https://..."}'

Every rank fetches, proves and decodes only what its own shards need.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from guarddcp import GuardedReader
from guarddcp.cli.gpt import GPT, SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="checkpoint: folder or URL")
    parser.add_argument("--storage-options", type=json.loads, help="JSON, for the file system behind the URL")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo", help="as it was trained")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = GPT(SIZES[args.size])
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)

    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "progress": {"step": 0}}
    reader = GuardedReader(args.path, storage_options=args.storage_options)
    dcp.load(state, storage_reader=reader)  # on an error all ranks stop, and say which tensors are undefined
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    # Proof of work: how much every rank holds, and one number that does not depend on the number of ranks.
    mine = sum(weight.to_local().numel() for weight in model.parameters() if isinstance(weight, DTensor))
    total = torch.zeros((), dtype=torch.float64)
    for moments in optimizer.state.values():
        total += moments["exp_avg_sq"].to_local().double().sum()
    dist.all_reduce(total)
    print(f"node {os.environ['GROUP_RANK']} rank {rank} of {ranks}: {mine} parameters", flush=True)
    dist.barrier()
    if rank == 0:
        bound = reader.report.certified_bound
        print(f"restored step {state['progress']['step']} on {ranks} ranks, certified within {bound:.6f} lr")
        print(f"sum of all second moments: {total.item():.9e}", flush=True)

    # gloo's threads may still hold tensors of the last collective: let them drop those before Python ends.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
