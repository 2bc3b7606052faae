"""symmetric_matmul: alpha A B^T + beta C + diag I where the result is known to be symmetric.

Tiles on and above the diagonal are computed and stored twice, so the two triangles are equal bit
for bit at half the work. Sums are float32 over growing k; alpha, beta C and diag are applied in
float32 and the result is rounded once.

path      | op                         | source                              | taken
compiled  | symmetric_matmul           | kernels-src/newton_schulz           | CUDA >= 8.0
triton    | symmetric_matmul_triton    | symmetric_matmul_triton.py          | other CUDA, ROCm
reference | symmetric_matmul_reference | reference/symmetric_matmul.py       | everything else
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from .._ops import add_op_namespace_prefix, ops
from ..reference import symmetric_matmul as reference
from .nf4_dequant import Path

_logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@register_fake(add_op_namespace_prefix("symmetric_matmul"))
def _fake(a, b, c, out, alpha, beta, diag, tile):
    return None


@custom_op(
    add_op_namespace_prefix("symmetric_matmul_reference"),
    mutates_args=("out",),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, float diag)"
    " -> ()",
)
def _reference(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, m, k)
    c: Tensor | None,  # (B, m, m)
    out: Tensor,  # (B, m, m)
    alpha: float,
    beta: float,
    diag: float,
) -> None:
    out.copy_(reference.symmetric_matmul(a, b, alpha=alpha, C=c, beta=beta, diag=diag))


_reference.register_fake(lambda *_: None)


def _has_compiled(key: str) -> bool:
    """Whether the loaded library implements the op for this dispatch key."""
    name = add_op_namespace_prefix("symmetric_matmul")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _serves(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _has_compiled("CUDA")
    )


@functools.cache
def _pick(device: torch.device) -> Path:
    if device.type == "cuda":
        if _serves(device):
            capability = torch.cuda.get_device_capability(device)
            return Path("compiled", f"CUDA kernel, capability {capability[0]}.{capability[1]}")
        if importlib.util.find_spec("triton") is not None:
            return Path("triton", f"{torch.cuda.get_device_name(device)} has no compiled kernel")
    if device.type == "meta":
        return Path("compiled", "shapes only")
    return Path("reference", f"float64 products of torch; no kernel for {device.type} tensors")


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("symmetric_matmul runs its portable path, which is slow: %s", reason)


@torch.compiler.assume_constant_result
def _pick_name(device: torch.device) -> str:
    path = _pick(device)
    if path.name == "reference":
        _say_once(path.reason)
    return path.name


def explain_symmetric_matmul(device: torch.device | str) -> str:
    """Say which implementation `symmetric_matmul` takes for tensors on `device`, and why.

    Args:
        device: device of the operands.

    Returns:
        One line, "<compiled | triton | reference>: <reason>".
    """
    path = _pick(torch.device(device))
    return f"{path.name}: {path.reason}"


def runs_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves tensors of this dtype on this device."""
    return dtype in DTYPES and _serves(device)


def symmetric_matmul(
    A: Tensor,
    B: Tensor | None = None,
    *,
    alpha: float = 1.0,
    C: Tensor | None = None,
    beta: float = 0.0,
    diag: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """alpha A B^T + beta C + diag I of a batch, where the caller knows that it is symmetric.

    A B^T is symmetric for B = A, and for products of polynomials of one symmetric matrix. Only the
    part on and above the diagonal is computed; the rest is its mirror image, bit for bit. Sums are
    float32, alpha, beta C and diag are applied in float32, and the result is rounded once. A matrix
    gives the same bits in any batch and under any strides. Builds no autograd graph.

    Args:
        A: (..., m, k), float16, bfloat16 or float32, any strides: `x.mT` gives X^T X of a tall X
            without a copy. Leading dimensions that no single stride walks are copied.
        B: Like A; None means A. For a symmetric B, A B^T is A B.
        alpha: Factor of the product.
        C: (..., m, m), symmetric (either triangle may be read), of A's dtype; may be `out` itself.
        beta: Factor of C; 0 leaves C unread.
        diag: Added to the diagonal.
        out: (..., m, m) of A's dtype, any strides; must not overlap A or B.

    Returns:
        (..., m, m) in A's dtype, or `out`. With k = 0 the product is 0.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit, beta without C, or out overlaps an operand.
    """
    scalars = {"alpha": alpha, "beta": beta, "diag": diag}
    _check_operands(A, B, C, scalars)
    m = A.shape[-2]
    square = (*A.shape[:-1], m)
    if out is None:
        out = A.new_empty(square)
    _check_out(A, B, C, out, square)
    batch = math.prod(A.shape[:-2])
    views = [
        None if x is None else x.detach().reshape(batch, *x.shape[-2:])
        for x in (A, A if B is None else B, C if beta != 0 else None)
    ]
    target = _as_batch(out.detach(), batch)
    result = A.new_empty((batch, m, m)) if target is None else target
    scalars = {name: float(value) for name, value in scalars.items()}
    with torch.no_grad():
        path = _pick_name(A.device)
        tile = {"tile": AUTO} if path == "compiled" else {}
        _op(path)(*views, result, **scalars, **tile)
        if target is None:
            out.copy_(result.view(square))
    return out


# The compiled op's table picks the tile; tests name each one.
AUTO = -1


def _op(path: str):
    """The registered op of a path; the Triton one is imported with its first use."""
    if path == "compiled":
        return ops.symmetric_matmul
    if path == "reference":
        return ops.symmetric_matmul_reference
    from . import symmetric_matmul_triton  # noqa: F401

    return ops.symmetric_matmul_triton


def _as_batch(out: Tensor, batch: int) -> Tensor | None:
    """out (..., m, m) as a view (batch, m, m); None if its strides allow none."""
    if out.ndim == 3:
        return out
    try:
        return out.view(batch, *out.shape[-2:])
    except RuntimeError:
        return None


def _check_operands(A: Tensor, B: Tensor | None, C: Tensor | None, scalars: dict) -> None:
    for name, x in (("A", A), ("B", B), ("C", C)):
        if x is None and name != "A":
            continue
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {_kind(x)}")
        if x.dtype not in DTYPES or x.dtype != A.dtype:
            allowed = "float16, bfloat16 or float32" if name == "A" else f"A's dtype {A.dtype}"
            raise TypeError(f"{name} must have {allowed}, got {x.dtype}; convert it first")
        if x.device != A.device:
            raise ValueError(f"{name} must be on the device of A {A.device}, got {x.device}")
    for name, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(
                f"{name} must be a number, got {_kind(value)}; scalars stay on the host"
            )
    if A.ndim < 2:
        raise ValueError(f"A must be (..., m, k), got shape {tuple(A.shape)}")
    if B is not None and B.shape != A.shape:
        raise ValueError(
            f"B must have the shape of A {tuple(A.shape)}, got {tuple(B.shape)}; it is read as its "
            "transpose, so pass B.mT for A B"
        )
    if C is not None and C.shape != (*A.shape[:-1], A.shape[-2]):
        raise ValueError(
            f"C must have shape {(*A.shape[:-1], A.shape[-2])} for A of shape {tuple(A.shape)}, "
            f"got {tuple(C.shape)}"
        )
    if C is None and scalars["beta"] != 0:
        raise ValueError(f"beta={scalars['beta']} scales C, which is None; pass C or beta=0")


def _check_out(
    A: Tensor, B: Tensor | None, C: Tensor | None, out: Tensor, square: tuple[int, ...]
) -> None:
    if not isinstance(out, Tensor) or out.layout != torch.strided or out.dtype != A.dtype:
        raise TypeError(f"out must be a dense tensor of A's dtype {A.dtype}, got {_kind(out)}")
    if out.shape != square:
        raise ValueError(f"out must have shape {tuple(square)}, got {tuple(out.shape)}")
    if out.device != A.device:
        raise ValueError(f"out must be on the device of A {A.device}, got {out.device}")
    if any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out is an expanded tensor, whose elements share memory; pass a full one")
    if torch.compiler.is_compiling():  # storages are opaque to the compiler, which copies anyway
        return
    for name, x in (("A", A), ("B", B), ("C", C)):
        if x is not None and _overlap(x, out) and not (name == "C" and _same(x, out)):
            raise ValueError(f"out overlaps {name} in memory; pass another tensor")


def _kind(x: object) -> str:
    return f"{x.dtype} with layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__


def _same(x: Tensor, y: Tensor) -> bool:
    return x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    (x_first, x_end), (y_first, y_end) = _byte_range(x), _byte_range(y)
    return x_first < y_end and y_first < x_end


def _byte_range(t: Tensor) -> tuple[int, int]:
    first = t.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (last + 1) * t.element_size()
