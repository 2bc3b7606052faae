"""Checkpoints that others have quantised: which of their tensors are one matrix, in which format.

quant_method   the tensors of a matrix `name`
bitsandbytes   name, name.absmax, name.quant_map, name.quant_state.bitsandbytes__nf4 (or __fp4) and,
               where absmax is quantised too, name.nested_absmax and name.nested_quant_map

A matrix is read packed, one expert at a time, or decoded. Whether a matrix is packed at all the
files themselves say, not the lists of modules in their configuration.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...moe.quantized.expert_weights import Format, format_of
from .model_files import ModelFiles

Parts = dict[str, str]  # part of a packed matrix -> name in the files


@dataclass(frozen=True)
class Packed:
    """A matrix (N, K) in a format.

    Args:
        format: how to read the tensors.
        shape: (N, K).
        tensors: those of the format by name, as rows that can be put below those of another matrix
            with the same K; flat where a block leaves the matrix, of which no stack can be made.
    """

    format: Format
    shape: tuple[int, int]
    tensors: dict[str, Tensor]

    def decode(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(N, K) on a device, rounded once."""
        order = self.format.layout((1, *self.shape))
        flat = [self.tensors[name].reshape(-1).to(device) for name in order]
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        return self.format.decode(flat, ids, self.shape, dtype)[0]


class Packing(ABC):
    """How a quant_method lays its matrices down in files.

    Attributes:
        by_outputs: whether a stack is (E, out, in) also where the model's is (E, in, out).
    """

    by_outputs = False

    @abstractmethod
    def parts(self, keys: Iterable[str]) -> dict[str, Parts]:
        """The tensors of every packed matrix, by its name."""

    @abstractmethod
    def shape(self, files: ModelFiles, parts: Parts) -> tuple[int, ...]:
        """(N, K), or (E, N, K) of a stack."""

    @abstractmethod
    def packed(self, files: ModelFiles, parts: Parts, place: int, count: int) -> Packed:
        """A matrix at a place of a stack of some; 0 of 1 is a matrix of its own.

        Raises:
            ValueError: it is not in a format that is known here.
        """


class BitsAndBytes(Packing):
    """4 bits of `bitsandbytes.nn.Linear4bit`, and of the stacks that it has parametrized.

    Nested absmax is read as float32, the values that bitsandbytes computes at each use: its offset
    differs from matrix to matrix, and a stack of ours has one.
    """

    STATE = ".quant_state.bitsandbytes__"
    SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")

    def __init__(self, config: dict[str, Any]) -> None:
        if config.get("load_in_8bit"):
            raise ValueError("its 8-bit matrices (load_in_8bit) have no format here")

    def parts(self, keys: Iterable[str]) -> dict[str, Parts]:
        """By the tensor that describes each matrix."""
        found = {}
        for key in keys:
            name, state, _ = key.partition(self.STATE)
            if state:
                sides = {side: f"{name}.{side}" for side in self.SIDES}
                found[name] = {"packed": name, "state": key, **sides}
        return found

    def shape(self, files: ModelFiles, parts: Parts) -> tuple[int, ...]:
        """As it was quantised."""
        return tuple(self._state(files, parts)["shape"])

    def packed(self, files: ModelFiles, parts: Parts, place: int, count: int) -> Packed:
        """Rows are blocks: what is below another matrix comes after it in memory, too."""
        state = self._state(files, parts)
        n, k = state["shape"][-2:]
        format = format_of(state["quant_type"], blocksize=state["blocksize"])
        # Its kernels hold the values themselves, and never read this.
        values, expected = files.read(parts["quant_map"]), format.constants(torch.device("cpu"))[0]
        if values.shape != expected.shape or (values - expected).abs().max() > 1e-6:
            raise ValueError(f"{parts['packed']} has other values than {format.quant_type}")
        whole = n * k % format.blocksize == 0
        # Stored as bytes, or under FSDP as any other dtype (bnb_4bit_quant_storage).
        packed = files.share(parts["packed"], place, count).reshape(-1).view(torch.uint8)
        absmax = files.share(parts["absmax"], place, count)
        if "nested_blocksize" in state:
            block = torch.arange(absmax.numel()) + place * absmax.numel()
            scale = files.read(parts["nested_absmax"])[block // state["nested_blocksize"]]
            absmax = files.read(parts["nested_quant_map"])[absmax.long()] * scale
            absmax += torch.tensor(state["nested_offset"], dtype=torch.float32)
        blocks = absmax.numel()
        if whole:
            packed, absmax = packed.view(blocks, -1), absmax.view(blocks, 1)
        return Packed(format, (n, k), {"packed": packed, "absmax": absmax})

    @staticmethod
    def _state(files: ModelFiles, parts: Parts) -> dict[str, Any]:
        return json.loads(bytes(files.read(parts["state"]).tolist()))


PACKINGS: dict[str, type[Packing]] = {"bitsandbytes": BitsAndBytes}


class PackedFiles:
    """A checkpoint by the names of its matrices, of which some are packed.

    Args:
        files: the checkpoint.
        quantization: config.json's `quantization_config`, or None.
        dtype: that matrices are decoded to.
        device: where they are decoded.

    Raises:
        ValueError: a quant_method that is not known here.
    """

    def __init__(
        self,
        files: ModelFiles,
        quantization: dict[str, Any] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.files, self.source, self._dtype, self._device = files, files.source, dtype, device
        self._parts: dict[str, Parts] = {}
        self.by_outputs = False
        if quantization is not None:
            self._packing = PACKINGS[quantization["quant_method"]](quantization)
            self.by_outputs = self._packing.by_outputs
            self._parts = self._packing.parts(files.names())

    def names(self) -> list[str]:
        """Every matrix, packed or not, and every other tensor."""
        sides = {key for parts in self._parts.values() for key in parts.values()}
        return [*self._parts, *(name for name in self.files.names() if name not in sides)]

    def is_packed(self, name: str) -> bool:
        """Whether it has a format."""
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor, or of the matrix that is packed."""
        if name in self._parts:
            return self._packing.shape(self.files, self._parts[name])
        return self.files.shape(name)

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, or what is packed in it, decoded on the device."""
        if name not in self._parts:
            return self.files.read(name)
        return self.packed(name).decode(self._dtype, self._device)

    def part(self, name: str, place: int) -> Tensor:
        """`tensor[place : place + 1]` of a tensor that is not packed."""
        return self.files.part(name, place)

    def packed(self, name: str, place: int = 0, count: int = 1) -> Packed:
        """As `Packing.packed`."""
        return self._packing.packed(self.files, self._parts[name], place, count)
