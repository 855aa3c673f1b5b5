"""guarddcp: certified compression of Adam moments for torch.distributed.checkpoint.

    import torch.distributed.checkpoint as dcp
    from guarddcp import Guard, GuardedReader, GuardedWriter

    dcp.save({"model": msd, "optim": osd}, storage_writer=GuardedWriter("s3://bucket/run/step-1000"))
    dcp.load({"model": msd, "optim": osd}, storage_reader=GuardedReader("s3://bucket/run/step-1000"))

Importing this package starts no CUDA, compiles nothing and touches no network; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from guarddcp.version import __version__

if TYPE_CHECKING:
    from guarddcp.certificate.rules import Adam
    from guarddcp.config import Guard
    from guarddcp.dcp.reader import GuardedReader
    from guarddcp.dcp.verification import inspect_checkpoint, verify
    from guarddcp.dcp.writer import GuardedWriter
    from guarddcp.errors import (
        CheckpointExistsError,
        CheckpointNotFoundError,
        FormatError,
        GuardBug,
        GuardError,
        IntegrityError,
        ToleranceError,
    )  # fmt: skip
    from guarddcp.report import Report

_HOMES = {
    "Adam": "guarddcp.certificate.rules",
    "Guard": "guarddcp.config",
    "GuardedReader": "guarddcp.dcp.reader",
    "GuardedWriter": "guarddcp.dcp.writer",
    "Report": "guarddcp.report",
    "inspect_checkpoint": "guarddcp.dcp.verification",
    "verify": "guarddcp.dcp.verification",
} | dict.fromkeys(
    (
        "CheckpointExistsError", "CheckpointNotFoundError", "FormatError", "GuardBug", "GuardError", "IntegrityError",
        "ToleranceError",
    ),
    "guarddcp.errors",
)  # fmt: skip

__all__ = [
    "Adam", "CheckpointExistsError", "CheckpointNotFoundError", "FormatError", "Guard", "GuardBug", "GuardError",
    "GuardedReader", "GuardedWriter", "IntegrityError", "Report", "ToleranceError", "__version__", "inspect_checkpoint",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'guarddcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
