"""Checkpoints that others have quantised: which of their tensors are one matrix, in which format.

quant_method   the tensors of a matrix `name`
bitsandbytes   name, name.absmax, name.quant_map, name.quant_state.bitsandbytes__nf4 (or __fp4) and,
               where absmax is quantised too, name.nested_absmax and name.nested_quant_map
mxfp4          name_blocks, name_scales
fp8            name, name_scale_inv
compressed-tensors   name, name_scale, of 8-bit floats

A matrix is read packed, one expert at a time, or decoded. Whether a matrix is packed at all the
files themselves say, not the lists of modules in their configuration.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...moe.quantized.expert_weights import Format, format_of
from .safetensors_reader import ModelFiles

Parts = dict[str, str]  # part of a packed matrix -> name in the files


@dataclass(frozen=True)
class Packed:
    """A matrix (N, K) in a format.

    Its tensors, by the format's names, are rows that can be put below those of another matrix with
    the same K; flat where a block leaves the matrix, of which no stack can be made.
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


class PackedFiles:
    """A checkpoint by the names of its matrices; packed ones are decoded to a dtype on a device.

    This class finds none that are packed. A subclass says how a quant_method lays them down, by
    its own `find`, `shape_of` and `packed`.
    """

    by_outputs = False  # whether a stack is (E, out, in) also where the model's is (E, in, out)

    def __init__(
        self,
        files: ModelFiles,
        dtype: torch.dtype,
        device: torch.device,
        config: dict[str, Any] | None = None,  # of the quant_method
    ) -> None:
        self.files, self.source, self.dtype, self.device = files, files.source, dtype, device
        self.parts = self.find(files.names(), config or {})

    def find(self, keys: list[str], config: dict[str, Any]) -> dict[str, Parts]:
        """The tensors of every packed matrix, by its name; ValueError for what has no format."""
        return {}

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        """(N, K), or (E, N, K) of a stack."""
        raise NotImplementedError

    def packed(self, name: str, place: int = 0, count: int = 1) -> Packed:
        """A matrix at a place of a stack of some; 0 of 1 is a matrix of its own."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Every matrix, packed or not, and every other tensor."""
        sides = {key for parts in self.parts.values() for key in parts.values()}
        return [*self.parts, *(name for name in self.files.names() if name not in sides)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor, or of the matrix that is packed."""
        if name in self.parts:
            return self.shape_of(self.parts[name])
        return self.files.shape(name)

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, or what is packed in it, decoded on the device."""
        if name not in self.parts:
            return self.files.read(name)
        return self.packed(name).decode(self.dtype, self.device)


class BitsAndBytes(PackedFiles):
    """4 bits of `bitsandbytes.nn.Linear4bit`, and of the stacks that it has parametrized.

    Nested absmax is read as float32, the values that bitsandbytes computes at each use: its offset
    differs from matrix to matrix, and a stack of ours has one.
    """

    STATE = ".quant_state.bitsandbytes__"
    SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")

    def find(self, keys: list[str], config: dict[str, Any]) -> dict[str, Parts]:
        if config.get("load_in_8bit"):
            raise ValueError("its 8-bit matrices (load_in_8bit) have no format here")
        states = {key.partition(self.STATE)[0]: key for key in keys if self.STATE in key}
        return {
            name: {"packed": name, "state": key, **{side: f"{name}.{side}" for side in self.SIDES}}
            for name, key in states.items()
        }

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        return tuple(self._state(parts)["shape"])

    def packed(self, name: str, place: int = 0, count: int = 1) -> Packed:
        """Rows are blocks: what is below another matrix comes after it in memory, too."""
        files, parts = self.files, self.parts[name]
        state = self._state(parts)
        n, k = state["shape"][-2:]
        format = format_of(state["quant_type"], blocksize=state["blocksize"])
        # Its kernels hold the values themselves, and never read this.
        values, expected = files.read(parts["quant_map"]), format.constants(torch.device("cpu"))[0]
        if values.shape != expected.shape or (values - expected).abs().max() > 1e-6:
            raise ValueError(f"{parts['packed']} has other values than {format.quant_type}")
        # Stored as bytes, or under FSDP as any other dtype (bnb_4bit_quant_storage).
        packed = files.share(parts["packed"], place, count).reshape(-1).view(torch.uint8)
        absmax = files.share(parts["absmax"], place, count)
        if "nested_blocksize" in state:
            block = torch.arange(absmax.numel()) + place * absmax.numel()
            scale = files.read(parts["nested_absmax"])[block // state["nested_blocksize"]]
            absmax = files.read(parts["nested_quant_map"])[absmax.long()] * scale
            absmax += torch.tensor(state["nested_offset"], dtype=torch.float32)
        if n * k % format.blocksize == 0:
            absmax = absmax.view(-1, 1)
            packed = packed.view(len(absmax), -1)
        return Packed(format, (n, k), {"packed": packed, "absmax": absmax})

    def _state(self, parts: Parts) -> dict[str, Any]:
        return json.loads(bytes(self.files.read(parts["state"]).tolist()))


class Mxfp4(PackedFiles):
    """gpt-oss's experts: blocks (E, N, K / 32, 16) of two codes a byte, scales (E, N, K / 32)."""

    by_outputs = True

    def find(self, keys: list[str], config: dict[str, Any]) -> dict[str, Parts]:
        names = (key.removesuffix("_blocks") for key in keys if key.endswith("_blocks"))
        return {name: {"packed": f"{name}_blocks", "scales": f"{name}_scales"} for name in names}

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        *rows, blocks, size = self.files.shape(parts["packed"])
        return *rows, 2 * blocks * size

    def packed(self, name: str, place: int = 0, count: int = 1) -> Packed:
        *_, n, k = self.shape(name)
        parts = self.parts[name].items()
        tensors = {part: self.files.share(key, place, count).view(n, -1) for part, key in parts}
        return Packed(format_of("mxfp4"), (n, k), tensors)


class Fp8(PackedFiles):
    """e4m3 and what it is multiplied by: a scale per block, per row or per matrix.

    Scales of activations are left out: products here take activations in 16 bits.
    """

    def find(self, keys: list[str], config: dict[str, Any]) -> dict[str, Parts]:
        self._block, scale = config.get("weight_block_size"), "_scale_inv"
        if config["quant_method"] == "compressed-tensors":
            groups = [group["weights"] for group in config["config_groups"].values()]
            groups = [group for group in groups if group is not None]  # of activations alone
            kinds = {(group["num_bits"], group["type"]) for group in groups}
            if kinds != {(8, "float")} or not all(group.get("symmetric", True) for group in groups):
                raise ValueError(f"of its matrices, {sorted(kinds)}, only 8-bit floats are known")
            blocks = {tuple(group.get("block_structure") or ()) for group in groups}
            if len(blocks) > 1:
                raise ValueError(f"its groups differ in block_structure: {sorted(blocks)}")
            self._block, scale = blocks.pop() or None, "_scale"
        if self._block is not None:
            rows, columns = self._block
            format_of("fp8", block_rows=rows, block_columns=columns)  # raises for other sizes
        found, known = {}, set(keys)
        for key in keys:
            name = key.removesuffix(scale)
            if key.endswith(scale) and name in known:
                stem = name.removesuffix("weight")
                unused = {u: f"{stem}{u}" for u in ("activation_scale", "input_scale")}
                unused |= {f"_{u}": f"{name}_{u}" for u in tuple(unused)}
                found[name] = {"packed": name, "scales": key, **unused}
        return found

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        return self.files.shape(parts["packed"])

    def packed(self, name: str, place: int = 0, count: int = 1) -> Packed:
        """Blocks become so low that they end with the matrix, a scale of all of it one per row."""
        files, parts = self.files, self.parts[name]
        n, k = files.shape(name)[-2:]
        elements = files.share(name, place, count)
        if elements.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} in {files.source} is {elements.dtype} with scales, no e4m3")
        grid = (1, 1)
        if self._block is not None:
            grid = tuple(-(-side // size) for side, size in zip((n, k), self._block, strict=True))
        scales = files.read(parts["scales"])
        if scales.numel() == 1:
            scales = scales.reshape(1).expand(count)
        if self._block is None and scales.numel() == count * n:
            grid = (n, 1)
        if scales.numel() != count * grid[0] * grid[1]:
            raise ValueError(
                f"{parts['scales']} in {files.source} has {scales.numel()} scales for {count} "
                f"x {n} x {k} elements in blocks of {self._block or 'all'}"
            )
        scales = scales.reshape(count, -1)[place]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float().view(grid)
        rows, columns = self._block or (n // grid[0], 0)
        height = math.gcd(n, rows) if self._block else 1
        scales = scales.repeat_interleave(rows // height, 0)[: n // height]
        format = format_of("fp8", block_rows=height, block_columns=columns)
        packed = elements.reshape(n, k).view(torch.uint8)
        return Packed(format, (n, k), {"packed": packed, "scales": scales})


PACKINGS: dict[str, type[PackedFiles]] = {
    "bitsandbytes": BitsAndBytes,
    "mxfp4": Mxfp4,
    "fp8": Fp8,
    "compressed-tensors": Fp8,
}
