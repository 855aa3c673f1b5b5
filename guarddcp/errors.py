"""The exception family of guarddcp.

    GuardError (RuntimeError)
      IntegrityError             stored bytes are not the bytes that were written
      ToleranceError             a certificate does not prove its tolerance
      FormatError                bytes or names that no version of the format allows
      CheckpointExistsError      (also FileExistsError)
      CheckpointNotFoundError    (also FileNotFoundError)
      GuardBug                   one of our own checks failed: please report it

Torch ships exceptions between ranks by pickle and drops ``__cause__`` on the way, so every message is
complete by itself (where, expected, got, what to do) and every attribute is a plain value.
"""

from __future__ import annotations

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "FormatError",
    "GuardBug",
    "GuardError",
    "IntegrityError",
    "ToleranceError",
]


class GuardError(RuntimeError):
    """Base of all errors that guarddcp raises on purpose.

    Parameters: ``message`` is the whole text. ``where`` names the file, tensor, shard or frame;
    ``expected`` and ``got`` hold the two sides of a failed comparison; ``hint`` says what to do. They are
    appended to the text in that order, and kept as plain attributes.
    """

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        parts = [message if where is None else f"{where}: {message}"]
        if expected is not None:
            parts.append(f"expected {expected}")
        if got is not None:
            parts.append(f"got {got}")
        text = "; ".join(parts)
        super().__init__(text if hint is None else f"{text}. {hint}")
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call __init__ with the finished text and append the parts a second time.
        return _rebuild, (type(self), str(self), self.__dict__)


def _rebuild(cls: type[GuardError], text: str, state: dict[str, object]) -> GuardError:
    error = cls(text)
    error.__dict__.update(state)
    return error


class IntegrityError(GuardError):
    """Stored bytes are not what was written: a checksum, digest, length or code range is wrong."""


class ToleranceError(GuardError):
    """A certificate, recomputed from its stored constants, does not prove the recorded tolerance."""


class FormatError(GuardError):
    """Bytes, fields, versions or names that the format does not allow."""


class CheckpointExistsError(GuardError, FileExistsError):
    """A checkpoint is already there and ``overwrite`` is off, or another writer was first."""


class CheckpointNotFoundError(GuardError, FileNotFoundError):
    """There is no complete guarddcp checkpoint at the path."""


class GuardBug(GuardError):
    """A check of our own work failed. The data are safe (nothing was committed); please report it."""
