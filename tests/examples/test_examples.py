"""The examples as their docstrings say to run them, small."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from guarddcp import GuardedReader
from guarddcp.cli.gpt import GPT, SIZES

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "examples" / "fsdp2_train_and_resume.py")
RESTORE = str(ROOT / "examples" / "multi_node_restore.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run"]


def start(*command):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    """What each process printed; fails with all of it, and with what they complained of, if one of them failed."""
    try:
        said = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(map("".join, said))
    return [output for output, _ in said]


def losses(output):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder and output of a run that two ranks trained to step 12 and saved at step 8."""
    run = tmp_path_factory.mktemp("run")
    command = [*LAUNCH, "--standalone", "--nproc-per-node", "2", TRAIN]
    (output,) = finish(start(*command, str(run), "--size", "tiny", "--save-at", "8", "--steps", "12"))
    return run, output


def test_training_saves_and_goes_on(trained):
    _, output = trained
    assert list(losses(output)) == list(range(1, 13))
    assert losses(output)[12] < losses(output)[1] - 0.3
    share = float(re.search(r"step-8: moments take (\S+)% of their bytes", output)[1])
    assert 5 < share < 40


def test_plain_python_resumes_what_two_ranks_saved(trained):
    run, output = trained
    (resumed,) = finish(start(sys.executable, TRAIN, str(run), "--size", "tiny", "--resume-from", "8", "--steps", "12"))
    bound = float(re.search(r"resumed step 8 on 1 ranks, certified within (\S+) lr", resumed)[1])
    assert 0 < bound <= 0.01
    assert list(losses(resumed)) == [9, 10, 11, 12]
    for step, loss in losses(resumed).items():
        assert loss == pytest.approx(losses(output)[step], abs=0.002)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_two_nodes_restore_on_four_ranks(trained):
    path = str(trained[0] / "step-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = [*LAUNCH, "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    outputs = finish(*(start(*node, "--node-rank", rank, RESTORE, path, "--size", "tiny") for rank in ("0", "1")))
    shares = re.findall(r"^node (\d) rank (\d) of 4: (\d+) parameters$", "\n".join(outputs), re.MULTILINE)
    nodes = sorted((node, rank) for node, rank, _ in shares)
    assert nodes == [("0", "0"), ("0", "1"), ("1", "2"), ("1", "3")], "\n".join(outputs)
    assert sum(int(share) for *_, share in shares) == SIZES["tiny"].parameters
    assert "restored step 8 on 4 ranks, certified within 0.01" in outputs[0]
    total = float(re.search(r"sum of all second moments: (\S+)", outputs[0])[1])
    assert total == pytest.approx(sum_of_second_moments(path), rel=1e-7)


def sum_of_second_moments(path):
    """The same number, restored in this process without any sharding."""
    model = GPT(SIZES["tiny"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    _, optim_state = get_state_dict(model, optimizer)
    dcp.load({"optim": optim_state}, storage_reader=GuardedReader(path), no_dist=True)
    return sum(float(each["exp_avg_sq"].double().sum()) for each in optim_state["state"].values())
