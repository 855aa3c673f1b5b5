"""Tensors as codecs want them: contiguous NumPy blocks of one frame at a time, and bytes of any dtype."""

from __future__ import annotations

import numpy as np
import torch

from guarddcp.codecs.view import Layout
from guarddcp.container.value_types import TENSOR_DTYPES

__all__ = ["FrameSource", "dtype_name", "is_plain", "raw_bytes", "rotates", "tensor_of_bytes"]

_ROTATED = {torch.float32, torch.bfloat16, torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are all there is to it: a dense torch.Tensor (or Parameter) of a plain dtype."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and dtype_name(tensor.dtype) in TENSOR_DTYPES
    )


def rotates(dtype: torch.dtype) -> bool:
    """Whether byte planes of this dtype gain from a rotation that puts the exponent into one byte."""
    return dtype in _ROTATED


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a dense tensor in row-major order, as uint8 (a view of its memory where that is possible)."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    if flat.numel() <= 1:  # torch calls one element contiguous at any stride, and then refuses to view it as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def tensor_of_bytes(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `raw_bytes`: a fresh 1-D CPU tensor. No factory function, which a default device would divert."""
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(dtype)


class FrameSource:
    """Reads a tensor frame by frame in the flat order of a layout.

    Only one frame is copied at a time, and none where the tensor already lies contiguous on the CPU in that order.
    """

    def __init__(self, tensor: torch.Tensor, layout: Layout) -> None:
        self._layout = layout
        source = tensor.detach().resolve_conj().resolve_neg().permute(layout.view.axes)
        in_place = source.device.type == "cpu" and source.is_contiguous()
        self._flat = source.reshape(-1) if in_place else None
        self._source = source

    def _frame(self, number: int) -> torch.Tensor:
        frame = self._layout.frame(number)
        if self._flat is not None:
            return self._flat[frame.begin : frame.end]
        out = torch.empty(frame.end - frame.begin, dtype=self._source.dtype, device="cpu")
        for at, box in self._layout.pieces(number):
            piece = self._source[tuple(slice(begin, end) for begin, end in box)]
            out[at : at + piece.numel()].view(piece.shape).copy_(piece)
        return out

    def block(self, number: int) -> np.ndarray:
        """Frame ``number`` as a C-contiguous array (rows, columns); float32 tensors only."""
        frame = self._layout.frame(number)
        return self._frame(number).numpy().reshape(frame.rows, frame.columns)

    def raw(self, number: int) -> np.ndarray:
        """Frame ``number`` as bytes, uint8."""
        return self._frame(number).view(torch.uint8).numpy()
