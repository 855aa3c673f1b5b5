"""A small byte-level GPT, a corpus that every Python installation has, and a plain training loop.

The demo and ``guarddcp bench`` need real Adam moments without a network. The text is the standard library's own
source, the model is a pre-norm transformer over bytes, and a batch is a function of (seed, step) alone: a run that
was restored at step ``t`` sees the same data from there on as the run that was never interrupted.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "SIZES", "Batches", "Size", "adamw", "load_corpus", "loss_of", "param_groups", "train_state"]

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of a model and of one step's batch.

    ``width`` is a multiple of ``heads``; ``block`` is the context in bytes; ``windows`` is the global batch in windows
    of ``block`` bytes (a multiple of every number of ranks that is to share it).
    """

    width: int
    layers: int
    heads: int
    block: int
    windows: int

    @property
    def parameters(self) -> int:
        """Number of trained scalars."""
        d = self.width
        per_layer = 12 * d * d + 10 * d
        return (2 * VOCABULARY + self.block) * d + self.layers * per_layer + 2 * d


SIZES = {
    "tiny": Size(width=48, layers=2, heads=2, block=32, windows=6),
    "demo": Size(width=192, layers=4, heads=4, block=64, windows=6),
    "full": Size(width=384, layers=6, heads=6, block=256, windows=1),
}
"""``tiny`` is for tests, ``demo`` for the demo's time limit, ``full`` (10.9 M parameters) for the benchmark."""


class Block(nn.Module):
    """Attention and feed-forward layer, each behind a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: that of the keys has no gradient but rounding noise, and Adam would blow that up to full steps.
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.attention_in(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_out(F.gelu(self.feed_in(self.norm2(x))))


class GPT(nn.Module):
    """Byte-level transformer: int64 (batch, time <= block) to float32 logits (batch, time, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.block, size.width)
        self.layers = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        deep = 0.02 / math.sqrt(2 * size.layers)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, 0.0, deep if name.endswith("_out.weight") else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per byte."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@cache
def load_corpus(limit: int = 4_000_000) -> Tensor:
    """The standard library's source text: uint8, one dimension, at most ``limit`` bytes; not to be written to.

    Files come in a fixed order, so one Python version gives one text.
    Raises RuntimeError if this Python has less than 100 000 bytes of it (a zipped or stripped library).
    """
    root = sysconfig.get_path("stdlib")
    text = bytearray()
    for folder, folders, names in os.walk(root):
        # In place and sorted: this is what steers os.walk, and the order must not depend on the file system.
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"})
        for name in sorted(names):
            if name.endswith(".py") and len(text) < limit:
                text += Path(folder, name).read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise RuntimeError(f"no training text: {root} holds {len(text)} bytes of Python source, 100000 are needed")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """Random windows of a text as a function of the step number alone."""

    def __init__(self, text: Tensor, *, block: int, windows: int, seed: int = 0) -> None:
        self.text, self.block, self.windows, self.seed = text, block, windows, seed

    def __call__(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``step``: the windows of this ``rank``, int64 (windows / ranks, block) each.

        Raises ValueError if the ranks cannot share the windows evenly.
        """
        if self.windows % ranks:
            raise ValueError(f"{self.windows} windows cannot be shared evenly by {ranks} ranks")
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.block, (self.windows,), generator=generator)
        mine = starts[rank::ranks].tolist()
        rows = torch.stack([self.text[at : at + self.block + 1] for at in mine]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def param_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, object]]:
    """Two groups as most training code makes them: matrices decay, vectors do not."""
    weights = list(model.parameters())
    return [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(groups: Iterable[Tensor] | Sequence[dict[str, object]], **settings: object) -> torch.optim.AdamW:
    """AdamW with torch's defaults for betas and eps, and a learning rate of 5e-4 that needs no warm-up here."""
    return torch.optim.AdamW(groups, **{"lr": 5e-4, **settings})  # type: ignore[arg-type]


def train_state(
    steps: int = 300,
    *,
    size: Size = SIZES["full"],
    seed: int = 0,
    lr: float = 5e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, object]:
    """Train in this process and return the Adam state after ``steps`` steps.

    Keys: ``params``, ``exp_avg``, ``exp_avg_sq`` ({name: float32 tensor}), ``step``, ``betas``, ``eps``,
    ``weight_decay``, ``lr`` and ``loss`` (of the last step). ``progress`` is called with (steps done, loss).
    """
    torch.manual_seed(seed)
    model = GPT(size)
    optimizer = adamw(model.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    batches = Batches(load_corpus(), block=size.block, windows=size.windows, seed=seed)
    loss = math.nan
    for step in range(steps):
        optimizer.zero_grad()
        value = loss_of(model, batches(step))
        value.backward()
        optimizer.step()
        loss = value.item()
        if progress is not None:
            progress(step + 1, loss)
    named = {name: weight for name, weight in model.named_parameters()}
    moments = {
        key: {name: optimizer.state[weight][key].detach().clone() for name, weight in named.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        "params": {name: weight.detach().clone() for name, weight in named.items()},
        **moments,
        "step": steps,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "lr": lr,
        "loss": loss,
    }
