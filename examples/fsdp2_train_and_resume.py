"""Train with FSDP2 and AdamW, save a certified checkpoint, resume on any number of ranks.

Train on two ranks and save after step 40; then go on from there with three ranks, or with one and without torchrun:

    torchrun --nproc-per-node 2 examples/fsdp2_train_and_resume.py /tmp/run --save-at 40 --steps 50
    torchrun --nproc-per-node 3 examples/fsdp2_train_and_resume.py /tmp/run --resume-from 40 --steps 50
    python examples/fsdp2_train_and_resume.py /tmp/run --resume-from 40 --steps 50

The losses of steps 41 to 50 agree with those of the uninterrupted run to four decimals. The folder may be a URL
(s3://bucket/run).
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from guarddcp import Guard, GuardedReader, GuardedWriter, verify
from guarddcp.cli.gpt import GPT, SIZES, Batches, load_corpus, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URL of the run; checkpoints go to RUN/step-N")
    parser.add_argument("--steps", type=int, default=50, help="train up to this step")
    parser.add_argument("--save-at", type=int, help="save after this step")
    parser.add_argument("--resume-from", type=int, help="resume from the checkpoint of this step")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    args = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Your model, optimizer and data. A batch depends on the step alone, so a resumed run sees the same ones.
    size = SIZES[args.size]
    torch.manual_seed(0)
    model = GPT(size)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    batches = Batches(load_corpus(), block=size.block, windows=size.windows)
    step = 0

    if args.resume_from is not None:
        # As with any DCP checkpoint: load in place into the state of this world's model and optimizer.
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state, "progress": {"step": 0}}
        reader = GuardedReader(f"{args.run}/step-{args.resume_from}")
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["progress"]["step"]
        if rank == 0:
            print(f"resumed step {step} on {ranks} ranks, certified within {reader.report.certified_bound:.6f} lr")

    while step < args.steps:
        loss = loss_of(model, batches(step, rank, ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.5f}", flush=True)

        if step == args.save_at:
            path = f"{args.run}/step-{step}"
            model_state, optim_state = get_state_dict(model, optimizer)
            writer = GuardedWriter(path, Guard(tolerance=0.01))
            dcp.save({"model": model_state, "optim": optim_state, "progress": {"step": step}}, storage_writer=writer)
            if rank == 0:
                moments = writer.report.moments
                print(f"saved {path}: moments take {moments.stored_bytes / moments.raw_bytes:.1%} of their bytes")
                verify(path)  # proves the whole checkpoint again, without the model; raises if anything is wrong

    # gloo's threads may still hold tensors of the last collective: let them drop those before Python ends.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
