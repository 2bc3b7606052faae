"""Formats of packed experts: how a stack is laid out, packed, decoded and multiplied.

Modules, layers, autograd, offload, saving and loading hold a `Format` and its tensors and know
neither. A format is added by a subclass of `Format` and its names in `FORMATS`. One that only
decodes is multiplied in slices that are decoded to memory; one with a product of its own says what
that takes by `registers_refusal`.
"""

from __future__ import annotations

import abc
import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .... import dispatch
from ....reference.nf4 import FP4_TABLE, NESTED_BLOCKSIZE, NF4_TABLE, nest_absmax
from ...checks import check_dense
from .. import packed_product
from ..codec import write_parts
from ..nf4_dequant import BLOCKSIZES, nf4_decoder, nf4_dequant
from ..nf4_quantize import nf4_quantize
from ..packed_product import PackedStack

Layout = dict[str, tuple[int, torch.dtype]]  # elements and dtype of every tensor, by its name


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A way to pack a stack of experts (E, N, K) into a few flat tensors.

    A format is a value: two with the same options read the same bytes. Its tensors have names and
    an order, those of `layout`; the first one is "packed".
    """

    # Scales belong to the sum: packed as (E, out, in), also where a model has (E, in, out).
    by_outputs: ClassVar[bool] = False

    quant_type: str  # the name of the format, a key of FORMATS
    # The format as a string, which ops take: `format_of_text` reads it.
    text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = (f"{name}={value!r}" for name, value in self.options().items())
        object.__setattr__(self, "text", " ".join(named))

    def options(self) -> dict[str, Any]:
        """What `format_of` takes to make it again; JSON can hold it."""
        fields = (field.name for field in dataclasses.fields(self) if field.init)
        return {name: getattr(self, name) for name in fields}

    @abc.abstractmethod
    def layout(self, stored: Sequence[int]) -> Layout:
        """The tensors of a stack of shape (E, N, K), in their order."""

    def check(self, tensors: dict[str, Tensor], stored: Sequence[int]) -> None:
        """Raise TypeError or ValueError unless packed bytes of a stack are what they must be."""
        layout = self.layout(stored)
        if list(tensors) != list(layout):
            raise ValueError(f"tensors must be those named {[*layout]}, got {[*tensors]}")
        for name, tensor in tensors.items():
            check_dense(f"tensors[{name!r}]", tensor)
        (size, dtype), packed = layout["packed"], tensors["packed"]
        if packed.dtype != dtype or packed.numel() != size:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"packed must be {size} bytes of {kind} for shape {tuple(stored)}, got "
                f"{packed.numel()} of {packed.dtype}"
            )

    @abc.abstractmethod
    def unit(self, stored: Sequence[int]) -> int:
        """Elements of the flattened stack that are packed together: `pack` takes whole units."""

    def unfinished(self, stored: Sequence[int]) -> Layout:
        """The tensors that `write` fills; other ones than `layout` where `finish` makes those."""
        return self.layout(stored)

    @abc.abstractmethod
    def pack(self, flat: Tensor, stored: Sequence[int]) -> tuple[Tensor, ...]:
        """The `unfinished` tensors of a run of elements of the flattened stack.

        Args:
            flat: (n,) contiguous; n is a multiple of `unit`, or the stack ends there.
            stored: (E, N, K).
        """

    def write(
        self, tensors: dict[str, Tensor], stored: Sequence[int], first: int, flat: Tensor
    ) -> None:
        """Pack elements [first, first + n) into `unfinished` tensors, in place.

        Args:
            tensors: Of the whole stack.
            stored: (E, N, K).
            first: A multiple of `unit`.
            flat: As of `pack`.
        """
        write_parts(tensors.values(), self.pack(flat, stored), first, math.prod(stored))

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `layout` from what `write` has filled."""
        return tensors

    @abc.abstractmethod
    def decode(
        self, tensors: Sequence[Tensor], ids: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """The named experts (n, *shape), each element rounded once to dtype.

        Raises:
            ValueError: Sizes, dtypes or devices do not fit.
        """

    def decoder(
        self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """ids -> decoded experts, for tensors that were checked before."""
        return lambda ids: self.decode(tensors, ids, shape, dtype)

    def decode_slice(
        self,
        tensors: Sequence[Tensor],
        stored: Sequence[int],
        first: int,
        offsets: Tensor,
        out: Tensor,
    ) -> None:
        """Decode experts from `first` on into out (n, N, K); those without rows need not be.

        Where a format has a Triton kernel for it, this is one launch that a plan can play again.

        Args:
            tensors: Those of `layout`, of the whole stack.
            stored: (E, N, K).
            first: Expert.
            offsets: (E + 1,) of `expert_sort`.
            out: Contiguous.
        """
        del offsets
        ids = torch.arange(first, first + out.shape[0], device=out.device)
        out.copy_(self.decode(tensors, ids, stored[1:], out.dtype))

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """What products read beside the tensors, such as a codebook: operands of every launch."""
        del device
        return ()

    def registers_refusal(self, stored: Sequence[int]) -> str | None:
        """Why no product decodes a stack in registers; None if one does."""
        del stored
        return f"no product decodes {self.quant_type} in registers"

    def compiled_refusal(
        self,
        device: torch.device,
        x: Tensor,
        tensors: Sequence[Tensor],
        stored: Sequence[int],
    ) -> str | None:
        """Why no compiled product takes rows like x; None if one does."""
        del device, x, tensors, stored
        return f"no compiled product reads {self.quant_type}"

    def compiled_pays(self, mean_rows: float, depth: int) -> bool:
        """Whether the compiled product is the faster one; see `packed_product.pays`."""
        del mean_rows, depth
        return False

    def activates(
        self, path: str, x: Tensor, stack: Stack, rows: int, activation: str, interleaved: bool
    ) -> bool:
        """Whether `product` applies the activation; see `packed_product.activates`."""
        del path, x, stack, rows, activation, interleaved
        return False

    def product(
        self, path: str, x: Tensor, stack: Stack, *operands: Any, **options: Any
    ) -> Tensor | None:
        """One grouped product that decodes in registers; arguments as of packed_product_triton.py.

        Path "compiled" takes the compiled product where it can, "measured" where it is faster too.
        Its `early` and `activated` are options, too: the latter where `activates`.
        """
        raise NotImplementedError(self.registers_refusal(stack.stored))


# Of a stack among the arguments of an op, and how many they are.
STACK = "Tensor[] stack, str format, int[] stored, bool transposed"
STACK_LENGTH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A stack of experts as products take it.

    Args:
        format: How to read the tensors.
        tensors: Those of `Format.layout`, in its order, and then `Format.constants`.
        stored: (E, N, K).
        transposed: Seen as (E, K, N): the forward's sum runs along the stored rows.
    """

    format: Format
    tensors: tuple[Tensor, ...]
    stored: tuple[int, int, int]
    transposed: bool

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], text: str, stored: Sequence[int], transposed: bool
    ) -> Stack:
        """The stack of an op's arguments (`STACK`)."""
        made = format_of_text(text)
        tensors = (*tensors, *made.constants(tensors[0].device))
        return cls(made, tensors, tuple(stored), transposed)

    @property
    def shape(self) -> tuple[int, int, int]:
        """As it is seen: E, inputs, outputs."""
        return shape_of(self.stored, self.transposed)

    @property
    def mT(self) -> Stack:  # noqa: N802
        """The same bytes seen the other way round, as by `Tensor.mT`."""
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """Those of the layout by their names, without the constants."""
        return dict(zip(self.format.layout(self.stored), self.tensors, strict=False))

    def decode_slice(self, first: int, offsets: Tensor, out: Tensor) -> None:
        """See `Format.decode_slice`."""
        own = tuple(self.own_tensors.values())
        self.format.decode_slice(own, self.stored, first, offsets, out)

    def decoder(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """ids -> decoded experts (n, N, K)."""
        return self.format.decoder(tuple(self.own_tensors.values()), self.stored[1:], dtype)


def shape_of(stored: Sequence[int], transposed: bool) -> tuple[int, int, int]:
    """Of a stack that is stored as (E, N, K) and seen as (E, K, N) if transposed."""
    experts, n, k = stored
    return (experts, k, n) if transposed else (experts, n, k)


class InRegisters(Format):
    """A format whose elements become numbers on their way to the tensor cores."""

    # Mean rows per expert from which on the compiled product is the faster one.
    least_rows: ClassVar[int] = packed_product.LEAST_ROWS

    @abc.abstractmethod
    def opened(self, tensors: Sequence[Tensor], stored: Sequence[int]) -> PackedStack:
        """What products take, of the tensors of `layout` and of `constants`, if these are there."""

    def registers_refusal(self, stored: Sequence[int]) -> str | None:
        """None: every stack."""
        del stored
        return None

    def compiled_refusal(
        self,
        device: torch.device,
        x: Tensor,
        tensors: Sequence[Tensor],
        stored: Sequence[int],
    ) -> str | None:
        """As of `packed_product`."""
        if not dispatch.is_hopper(device):
            return "it needs capability 9.0"
        return packed_product.refusal(x, self.opened(tensors, stored))

    def compiled_pays(self, mean_rows: float, depth: int) -> bool:
        """As of `packed_product`."""
        return packed_product.pays(mean_rows, depth, self.least_rows)

    def activates(
        self, path: str, x: Tensor, stack: Stack, rows: int, activation: str, interleaved: bool
    ) -> bool:
        """Where the compiled product is taken, and can."""
        opened = self.opened(stack.tensors, stack.stored)
        fits = packed_product.activates(x, opened, activation, interleaved)
        return stack.transposed and fits and self._takes_compiled(path, x, opened, rows, True)

    def _takes_compiled(
        self, path: str, x: Tensor, opened: PackedStack, rows: int, last: bool
    ) -> bool:
        """By name whatever comes, measured what it can take and is the faster one at."""
        if path != dispatch.MEASURED:
            return path == "compiled"
        experts, n, k = opened.stored
        pays = self.compiled_pays(rows / experts, k if last else n)
        return pays and dispatch.is_hopper(x.device) and packed_product.refusal(x, opened) is None

    def product(
        self,
        path: str,
        x: Tensor,
        stack: Stack,
        *operands: Any,
        activated: Tensor | None = None,
        early: bool = False,
        **options: Any,
    ) -> Tensor | None:
        """By CUDA or Triton."""
        opened = self.opened(stack.tensors, stack.stored)
        last, (*_, order, out) = stack.transposed, operands
        operands = (x, opened, last, *operands)
        # Triton's product alone gives the gates' gradient without a result.
        wanted = out is not None or path != dispatch.MEASURED
        if wanted and self._takes_compiled(path, x, opened, order.slots.shape[0], last):
            options |= {"activated": activated, "early": early}
            return packed_product.prefer_compiled(*operands, **options)
        from ..packed_product_triton import packed_product as by_triton

        return by_triton(*operands, **options)


@dataclasses.dataclass(frozen=True)
class Blockwise4Bit(InRegisters):
    """bitsandbytes' NF4 and FP4: two codes a byte, and the largest magnitude of every block.

    Blocks run over the flattened stack and may straddle rows and experts. With `nested` absmax is
    quantised too, to 8 bits in blocks of 256: 4.13 instead of 4.5 bits per element at blocksize 64.
    """

    quant_type: str = "nf4"
    blocksize: int = 64
    nested: bool = False

    NESTED: ClassVar[tuple[str, ...]] = ("absmax_code", "absmax_scale", "absmax_offset")

    def __post_init__(self) -> None:
        if self.blocksize not in BLOCKSIZES:
            raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {self.blocksize}")
        super().__post_init__()

    def layout(self, stored: Sequence[int]) -> Layout:
        """Codes; absmax, or its own codes, their values, scales and offset."""
        elements = math.prod(stored)
        blocks = -(-elements // self.blocksize)
        packed = {"packed": ((elements + 1) // 2, torch.uint8)}
        if not self.nested:
            return {**packed, "absmax": (blocks, torch.float32)}
        sizes = (256, -(-blocks // NESTED_BLOCKSIZE), 1)
        nested = {n: (size, torch.float32) for n, size in zip(self.NESTED, sizes, strict=True)}
        return {**packed, "absmax": (blocks, torch.uint8), **nested}

    def unit(self, stored: Sequence[int]) -> int:
        """A block."""
        del stored
        return self.blocksize

    def unfinished(self, stored: Sequence[int]) -> Layout:
        """absmax is nested at the end, since its mean is subtracted."""
        return dataclasses.replace(self, nested=False).layout(stored)

    def pack(self, flat: Tensor, stored: Sequence[int]) -> tuple[Tensor, ...]:
        """By `nf4_quantize`."""
        del stored
        return nf4_quantize(flat, self.blocksize, quant_type=self.quant_type)

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nest absmax."""
        if not self.nested:
            return tensors
        codes, *nested = nest_absmax(tensors["absmax"])
        return {**tensors, "absmax": codes, **dict(zip(self.NESTED, nested, strict=True))}

    def decode(
        self, tensors: Sequence[Tensor], ids: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """By `nf4_dequant`."""
        packed, absmax, *nested = tensors
        own = self._own_codebook(packed.device)
        return nf4_dequant(packed, absmax, ids, shape, self.blocksize, dtype, own, *nested)

    def decoder(
        self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """By the op that `nf4_dequant` takes."""
        own = self._own_codebook(tensors[0].device)
        return nf4_decoder(tensors, shape, self.blocksize, dtype, own)

    def decode_slice(
        self,
        tensors: Sequence[Tensor],
        stored: Sequence[int],
        first: int,
        offsets: Tensor,
        out: Tensor,
    ) -> None:
        """By Triton, and the experts that have rows alone."""
        from ..dequant_triton import decode_nibbles

        packed, absmax, *nested = tensors
        options = (self.blocksize, self._own_codebook(packed.device), nested or (None,) * 3)
        decode_nibbles(out, packed, absmax, offsets, *options, mx=False, first=first)

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """The values of the codes."""
        return (_codebook(self.quant_type, device),)

    def registers_refusal(self, stored: Sequence[int]) -> str | None:
        """A step of the sum takes one absmax per stored row and block."""
        if stored[2] % self.blocksize == 0:
            return None
        return (
            f"blocks of {self.blocksize} leave their row of {stored[2]} elements; quantise with a "
            "blocksize that divides it"
        )

    @property
    def least_rows(self) -> int:
        """Few rows gain less than it takes to write plain scales."""
        return packed_product.LEAST_ROWS if self.nested else packed_product.LEAST_ROWS_OF_FEW

    def opened(self, tensors: Sequence[Tensor], stored: Sequence[int]) -> PackedStack:
        """Absmax as scales."""
        packed, absmax, *others = tensors
        count = len(self.NESTED) if self.nested else 0
        codebook = others[count] if len(others) > count else None
        nested = tuple(others[:count]) if self.nested else None
        return PackedStack(packed, absmax, codebook, nested, tuple(stored), self.blocksize)

    def _own_codebook(self, device: torch.device) -> Tensor | None:
        """None for NF4, whose values the decoding kernels hold themselves."""
        return None if self.quant_type == "nf4" else _codebook(self.quant_type, device)


FORMATS: dict[str, type[Format]] = {"nf4": Blockwise4Bit, "fp4": Blockwise4Bit}
_TABLES = {"nf4": NF4_TABLE, "fp4": FP4_TABLE}


@functools.cache
def _codebook(quant_type: str, device: torch.device) -> Tensor:
    """The values of 16 codes on a device, copied there once."""
    return torch.tensor(_TABLES[quant_type], dtype=torch.float32, device=device)


@torch.compiler.assume_constant_result
@functools.cache
def format_of(quant_type: str = "nf4", **options: Any) -> Format:
    """The format of a name with its options.

    Raises:
        ValueError: Unknown name, an option that the format does not have, or a value of one.
    """
    if quant_type not in FORMATS:
        raise ValueError(f"quant_type must be one of {tuple(FORMATS)}, got {quant_type!r}")
    kind = FORMATS[quant_type]
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{quant_type} has the options {known}, got {', '.join(unknown)}")
    return kind(quant_type=quant_type, **options)


@functools.cache
def format_of_text(text: str) -> Format:
    """The format that `Format.text` describes."""
    named = (one.split("=", 1) for one in text.split(" "))
    return format_of(**{name: ast.literal_eval(value) for name, value in named})
