"""What the methods share around an iteration: checks, constants of a graph, the call of their op.

Everything is checked before anything is written. Schedules and dtypes follow from Python numbers
alone: marked as constant results, they are computed once while a graph is traced instead of being
traced operation by operation.

A compiler has to see an iteration as one op, or it would trace every slice of a batch. Called
eagerly, such an op costs the host 45 us of torch's wrappers for autograd and aliasing, once per
shape and step; the function behind it gives the same bits without them (`call`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.products.operands import overlap
from .coefficients import CoefficientSet, Rows, frozen_rows, polar_express_set, resolve_coefficients

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform of torch.func such as vmap is to see what is done with x."""
    if torch.compiler.is_compiling():  # which sees all that is done
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_input(x: torch.Tensor) -> None:
    """TypeError or ValueError unless x is a dense floating-point tensor (..., m, n)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be dense (torch.strided), got {x.layout}; pass x.to_dense()")
    if x.dtype not in FLOATING:
        raise TypeError(f"x must be one of {_names(FLOATING)}, got {x.dtype}; convert it first")
    if x.ndim < 2:
        raise ValueError(
            f"x must have at least 2 dimensions (..., m, n), got shape {tuple(x.shape)}; "
            f"a vector has no polar factor, update it with AdamW instead"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """ValueError unless iterates can be kept in dtype."""
    if dtype not in FLOATING:
        raise ValueError(f"dtype must be one of {_names(FLOATING)} or None, got {dtype!r}")


def output_for(x: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor like x in `dtype`, or `out` after checking it.

    `out` may have any floating dtype and strides as slices, transposes and permutations of full
    tensors have them, which address each element once. It must not overlap x: the input is never
    modified.
    """
    if out is None:
        return x.new_empty(x.shape, dtype=dtype)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    if out.layout != torch.strided or out.dtype not in FLOATING:
        raise TypeError(
            f"out must be a dense tensor of one of {_names(FLOATING)}, got {out.dtype} "
            f"with layout {out.layout}"
        )
    if out.shape != x.shape:
        raise ValueError(f"out must have the shape of x {tuple(x.shape)}, got {tuple(out.shape)}")
    if out.device != x.device:
        raise ValueError(f"out must be on the device of x {x.device}, got {out.device}")
    if _elements_may_coincide(out):
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}, as expanded tensors do: "
            "its elements may share memory; pass a full tensor"
        )
    # Storages are opaque to the compiler, where a functional copy keeps x intact anyway, and behind
    # the tensors of torch.vmap, which come here again without their wrappers.
    opaque = torch.compiler.is_compiling() or is_wrapped(x) or is_wrapped(out)
    if not opaque and overlap(x, out):
        raise ValueError("out overlaps x in memory, and x is never modified; pass another tensor")
    return out


def _elements_may_coincide(t: torch.Tensor) -> bool:
    """Whether some stride steps no further than the elements below it reach together.

    Exact for whatever indexing full tensors gives. Strides that interleave without a collision,
    which only as_strided makes, count as colliding: telling them apart is NP-hard in general.
    """
    if t.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def schedule(
    coefficients: str | CoefficientSet | Sequence[Sequence[float]], steps: int
) -> tuple[Rows, float]:
    """(rows, prefactor) of a `steps`-step schedule; see `resolve_coefficients`."""
    return _schedule(coefficients, _number(steps))


def polar_express_schedule(
    steps: int, lower: float, safety: float, cushion: float
) -> tuple[Rows, float]:
    """(rows, prefactor) of the Polar Express schedule derived for `steps`."""
    return _polar_express_schedule(
        _number(steps), _constant(lower), _constant(safety), _constant(cushion)
    )


@torch.compiler.assume_constant_result
def dtype_for(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`default_dtype`: the iterate dtype for an input dtype on a device."""
    return default_dtype(dtype, device)


@functools.cache  # torch takes the host 5 us to look a device up
def default_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Iterate dtype for an input dtype on a device.

    float64 input keeps float64. On CUDA from compute capability 8.0 (Ampere) float16: as fast as
    bfloat16 with eight times its precision. Elsewhere float32.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.float16
    return torch.float32


@torch.compiler.assume_constant_result
def _schedule(coefficients, steps: int) -> tuple[Rows, float]:
    return resolve_coefficients(frozen_rows(coefficients), steps)


@torch.compiler.assume_constant_result
def _polar_express_schedule(
    steps: int, lower: float, safety: float, cushion: float
) -> tuple[Rows, float]:
    table = polar_express_set(steps, lower, safety, cushion)
    return table.rows, table.prefactor


def _number(steps: int) -> int:
    """`steps`, made a constant where the compiler has turned it into a symbol.

    That happens from the second value on. The length of a tuple is always a constant.
    """
    return len((None,) * steps) if torch.compiler.is_compiling() else steps


def _constant(number: float) -> float:
    """A float or an int, made a constant likewise: text is always one."""
    if not torch.compiler.is_compiling():
        return number
    return _number(number) if isinstance(number, int) else float.fromhex(number.hex())


def serve_vmap(op: torch.library.CustomOpDef) -> None:
    """Give a rule for torch.vmap to an op (x, out, ...) -> () over matrices (..., m, n).

    The mapped dimension goes to the front, where it is one more of the batch.
    """

    def batched(info: Any, in_dims: tuple[int | None, ...], x, out, *rest: Any) -> tuple:
        if in_dims[1] is None:
            raise ValueError(
                f"out is one tensor {tuple(out.shape)} for all {info.batch_size} calls that "
                "torch.vmap makes one of; leave it away, or pass one for each"
            )
        shared = in_dims[0] is None
        x = x.expand(info.batch_size, *x.shape) if shared else x.movedim(in_dims[0], 0)
        op(x, output_for(x, out.movedim(in_dims[1], 0), out.dtype), *rest)
        return None, None

    op.register_vmap(batched)


def call(
    op: Callable[..., None],
    function: Callable[..., None],
    x: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
) -> None:
    """Call the op where a compiler, a transform or a subclass of Tensor sees it, else its function.

    Args:
        op: registered for `function`.
        function: (x, out, ...) -> None, which writes `out`.
        x: input of both.
        out: output of both.
        rest: further arguments of both.
    """
    plain = {type(x), type(out)} == {torch.Tensor} and not is_wrapped(x) and not is_wrapped(out)
    if torch.compiler.is_compiling() or not plain:
        op(x, out, *rest)
        return
    function(x, out, *rest)
    torch.autograd.graph.increment_version(out)  # as the op does: autograd must know
