"""The short way past a registered op of Python.

A compiler has to see an iteration as one op, or it would trace every slice of a batch. Called
eagerly, such an op costs the host 45 us of torch's wrappers for autograd and aliasing, once per
shape and step; the function behind it gives the same bits without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arguments import is_wrapped, output_for


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
