"""What the public functions accept; everything is checked before anything is written."""

from __future__ import annotations

import torch

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
    if not opaque and _overlap(x, out):
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


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.numel() == 0 or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    (x_first, x_end), (y_first, y_end) = _byte_range(x), _byte_range(y)
    return x_first < y_end and y_first < x_end


def _byte_range(t: torch.Tensor) -> tuple[int, int]:
    first = t.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (last + 1) * t.element_size()


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
