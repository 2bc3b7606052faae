"""The products of an iteration: which are symmetric, and who computes them.

Half of a symmetric product is redundant. The compiled `symmetric_matmul` skips it and folds the
scalars, b, c and the diagonal a, into the same rounding. On Hopper, in half precision, it and the
compiled `matmul_add` compute every product; elsewhere torch's dense products run, in float32 with
IEEE arithmetic whatever the process allows (`ieee_float32`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from .._ops import ops
from ..kernels.products import square_chain
from ..kernels.products.matmul_add import by_tma
from ..kernels.products.matmul_add import runs_compiled as runs_dense_compiled
from ..kernels.products.symmetric_matmul import AUTO, runs_compiled

HALF_PRECISION = (torch.float16, torch.bfloat16)
# Sides whose squares run as one launch. Beyond, a matrix has tiles enough to occupy the device, and
# a group of matrices does not fit L2; below, half of a tile is empty.
SMALLEST_CHAIN, LARGEST_CHAIN = 65, 1024


def batch_is_free(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether no product's bits depend on the batch: the compiled kernels compute them all."""
    return runs_dense_compiled(device, dtype) and runs_compiled(device, dtype)


def may_write(out: torch.Tensor) -> bool:
    """Whether the compiled dense product can write to out (G, R, C) by rows."""
    return out.stride(-1) == 1 and by_tma(out)


def runs_symmetric(m: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether m x m polynomials of a Gram matrix are computed by halves on this device.

    With Hopper's instructions always: 0.98 times the speed of cuBLAS for X X^T of one matrix of
    m = 2048, 1.04 to 1.96 elsewhere, 1.15 to 2.08 with b A + c A^2.
    """
    if batch_is_free(dtype, device):
        return True
    return _pays(m, dtype) and runs_compiled(device, dtype)


def chain_serves(count: int, m: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether polynomials of so many m x m Gram matrices of a slice are computed in one launch."""
    fits = SMALLEST_CHAIN <= m <= LARGEST_CHAIN
    return fits and square_chain.serves(count, m, dtype, device)


def _pays(m: int, dtype: torch.dtype) -> bool:
    """Where the kernel with sm_80's instructions is not slower than cuBLAS on an H200.

    Half precision, k = m, one matrix: 0.87 times its speed at m = 3072, 1.13 at 4096, 1.10 at 8192
    for b A + c A^2. Between the last two the tiles fill the last round of multiprocessors badly.
    float32: 1.16 at 2048, 1.52 at 4096.
    """
    if dtype in HALF_PRECISION:
        return m == 4096 or m >= 8192
    return m >= 2048


def gram_runs_symmetric(r: int, c: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether X X^T of r x c matrices is computed by halves.

    With sm_80's instructions X^T X of a tall half-precision X is not: it ran at 0.93 times the
    speed of cuBLAS for m = 4096.
    """
    wide = r <= c or dtype not in HALF_PRECISION or batch_is_free(dtype, device)
    return wide and runs_symmetric(min(r, c), dtype, device)


def folds_diagonal(x: torch.Tensor) -> bool:
    """Whether a X + B X runs as (a I + B) X for x (G, R, C).

    That saves a pass over X, and in half precision it costs no accuracy. In float32 the rounding of
    a I + B is what limits the result: 1.45 times the error on spectra with small singular values.
    """
    return x.dtype in HALF_PRECISION and runs_symmetric(min(x.shape[-2:]), x.dtype, x.device)


def gram(x: torch.Tensor) -> torch.Tensor:
    """X X^T or X^T X of x (G, R, C), whichever is smaller: (G, m, m)."""
    rows = x.mT if x.shape[-2] > x.shape[-1] else x
    if gram_runs_symmetric(x.shape[-2], x.shape[-1], x.dtype, x.device):
        return symmetric(rows, rows)
    return torch.bmm(rows, rows.mT)


def quadratic(A: torch.Tensor, b: float, c: float) -> torch.Tensor:
    """b A + c A^2 of A (G, m, m); a cubic schedule has c = 0 and saves the product."""
    return add_symmetric(A, A, A, beta=b, alpha=c) if c else (in_float32(A) * b).to(A.dtype)


def folded_quadratic(A: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """a I + b A + c A^2 of A (G, m, m), rounded once."""
    if c:
        return symmetric(A, A, alpha=c, C=A, beta=b, diag=a)
    Z = in_float32(A) * b
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z.to(A.dtype)


def add_symmetric(
    C: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *, beta: float, alpha: float = 1.0
) -> torch.Tensor:
    """beta C + alpha A B of symmetric C, A, B (G, m, m) that commute but for rounding."""
    if runs_symmetric(A.shape[-1], A.dtype, A.device):
        return symmetric(A, B, alpha=alpha, C=C, beta=beta)
    return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)


def symmetric(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    alpha: float = 1.0,
    C: torch.Tensor | None = None,
    beta: float = 0.0,
    diag: float = 0.0,
    scale: torch.Tensor | None = None,  # (G,) float32
    powers: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """alpha A B^T + beta C + diag I of A, B (G, m, k): `symmetric_matmul`, unchecked.

    Powers of `scale` multiply alpha and beta.
    """
    out = A.new_empty((A.shape[0], A.shape[1], A.shape[1]))
    ops.symmetric_matmul(A, B, C, out, alpha, beta, diag, AUTO, scale, *powers)
    return out


def square(
    A: torch.Tensor,
    C: torch.Tensor,
    *,
    alpha: float,
    beta: float,
    delta: float,
    scale: torch.Tensor | None = None,
    powers: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """alpha A A^T + beta C + delta I of symmetric A, C (G, m, m), rounded once in half precision.

    torch's dense product takes no `scale`, which is as for `symmetric`.
    """
    if runs_symmetric(A.shape[-1], A.dtype, A.device):
        options = {} if scale is None else {"scale": scale, "powers": powers}
        return symmetric(A, A, alpha=alpha, C=C, beta=beta, diag=delta, **options)
    out = torch.baddbmm(C, A, A.mT, beta=beta, alpha=alpha)
    diagonal = out.diagonal(dim1=-2, dim2=-1)
    if out.dtype in HALF_PRECISION and delta:
        added = C.diagonal(dim1=-2, dim2=-1)
        square_diagonal(A, added, diagonal, alpha=alpha, beta=beta, delta=delta)
    else:
        diagonal.add_(delta)
    return out


def square_diagonal(
    A: torch.Tensor,  # (..., r, m), rows of a symmetric matrix
    C: torch.Tensor,  # (..., r)
    out: torch.Tensor,  # (..., r)
    *,
    alpha: float,
    beta: float,
    delta: float,
) -> None:
    """The diagonal of alpha A A + beta C + delta I, beta != 0, from norms of rows, rounded once.

    alpha A A and delta I nearly cancel: with a rounding between them the elements, which are nearly
    equal, err alike, and no size averages that out. Three launches, one of which reads A.
    """
    wide = torch.promote_types(A.dtype, torch.float32)
    norms = torch.linalg.vector_norm(A, dim=-1, dtype=wide)
    total = torch.addcmul(C, norms, norms, value=alpha / beta)  # in the wider dtype
    torch.add(torch.tensor(delta, dtype=wide, device="cpu"), total, alpha=beta, out=out)


def matrix_norm(x: torch.Tensor, order: float = 2) -> torch.Tensor:
    """Norm of the elements of each matrix of x (G, R, C) -> (G, 1, 1), in float32 or wider.

    Rows first: a float32 sum over one row of 10^4 is accurate where one over 10^8 drifts.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = torch.linalg.vector_norm(x, order, dim=-1, keepdim=True, dtype=wide)
    return torch.linalg.vector_norm(rows, order, dim=-2, keepdim=True)


def apply_gram_side(
    x: torch.Tensor,
    B: torch.Tensor,
    add: torch.Tensor | None = None,
    *,
    beta: float = 0.0,
    scale: torch.Tensor | None = None,  # (G,) float32
    out: torch.Tensor | None = None,  # (G, R, C)
) -> torch.Tensor:
    """scale (B X + beta add), or scale (X B + beta add) for tall x (G, R, C), B symmetric.

    The compiled kernel applies `scale` before its one rounding and writes into `out`; torch's
    product is of the rounded scale B, and in a tensor of its own.
    """
    tall = x.shape[-2] > x.shape[-1]
    if batch_is_free(x.dtype, x.device):
        out = torch.empty_like(x) if out is None else out
        operands = (x, B) if tall else (B, x)
        _multiply(*operands, add, out, beta, scale)
        return out
    if scale is not None:
        B = (in_float32(B) * scale[:, None, None]).to(B.dtype)
    return dense(*((x, B) if tall else (B, x)), add, beta=beta)


def dense(
    A: torch.Tensor, B: torch.Tensor, C: torch.Tensor | None = None, *, beta: float = 0.0
) -> torch.Tensor:
    """A B + beta C of A (G, m, k), B (G, k, n) and C (G, m, n)."""
    if batch_is_free(A.dtype, A.device):
        out = A.new_empty((A.shape[0], A.shape[1], B.shape[2]))
        _multiply(A, B, C, out, beta)
        return out
    return torch.bmm(A, B) if C is None else torch.baddbmm(C, A, B, beta=beta)


def _multiply(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor | None,
    out: torch.Tensor,
    beta: float,
    scale: torch.Tensor | None = None,
) -> None:
    """scale (A B + beta C) into out, compiled: unchecked, of operands that TMA takes."""
    ops.matmul_add(A, B, C, out, 1.0, beta, AUTO, scale)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, float64 as it is: for elementwise arithmetic with a Python scalar.

    The CPU rounds the scalar itself to a half-precision tensor's dtype first. As `a` enters every
    row alike, that triples the error of a float16 Gram iteration (5.2e-3 instead of 1.9e-3).
    """
    return x if x.dtype == torch.float64 else x.float()


# torch's precision of float32 products is one switch per (backend, operation) for the whole
# process. A switch left at "none" takes the value of its backend, and that one the value of all.
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}
_REDUCED = ("tf32", "bf16")
_EVERYTHING = ("generic", "all")

Switch = tuple[str, str]


@contextmanager
def ieee_float32(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Keeps TF32 and bfloat16 out of float32 iterates, whatever the process allows elsewhere.

    Whoever asks for float32 iterates asks for their accuracy; TF32 has float16's mantissa at half
    its speed. A switch that allows neither is not touched. Otherwise it is held at "ieee" around
    the launches, and with it the products that other threads launch meanwhile.
    """
    if device.type not in _BACKENDS or dtype != torch.float32:
        yield
        return
    hold = _HOLDS[device.type]
    hold.acquire()
    try:
        yield
    finally:
        hold.release()


class _Hold:
    """One switch at "ieee" while any thread asks for it; the last one puts back what was there."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.lock = Lock()
        self.holders = 0
        self.before: str | None = None  # what the switch said, while it is held

    def acquire(self) -> None:
        with self.lock:
            self.holders += 1
            if _read(self.switch) in _REDUCED:
                self.before = _own(self.switch)
                _write(self.switch, "ieee")

    def release(self) -> None:
        with self.lock:
            self.holders -= 1
            if self.holders == 0 and self.before is not None:
                if _read(self.switch) == "ieee":  # else someone set it anew, which stands
                    _write(self.switch, self.before)
                self.before = None


_HOLDS = {device: _Hold((backend, "matmul")) for device, backend in _BACKENDS.items()}


def _own(switch: Switch) -> str:
    """What a switch with a reduced value itself says: that value, or "none" if it is inherited.

    torch reads the value with inheritance only. Where the parent has the same one, the parent goes
    to "ieee" for a moment, which makes nobody's products less accurate, and the switch either
    follows or does not.
    """
    value = _read(switch)
    if switch == _EVERYTHING:
        return value
    parent = _EVERYTHING if switch[1] == "all" else (switch[0], "all")
    if _read(parent) != value:
        return value
    before = _own(parent)
    _write(parent, "ieee")
    follows = _read(switch) != value
    _write(parent, before)
    return "none" if follows else value


def _read(switch: Switch) -> str:
    return torch._C._get_fp32_precision_getter(*switch)


def _write(switch: Switch, value: str) -> None:
    torch._C._set_fp32_precision_setter(*switch, value)
