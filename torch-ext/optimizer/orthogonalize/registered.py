"""The short way past a registered op of Python.

A compiler has to see an iteration as one op, or it would trace every slice of a batch. Called
eagerly, such an op costs the host 45 us of torch's wrappers for autograd and aliasing, once per
shape and step; the function behind it gives the same bits without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ops import add_op_namespace_prefix
from .arguments import is_wrapped, output_for


def register(name: str, function: Callable[..., None], schema: str) -> None:
    """Make a function (x, out, ...) -> None over matrices (..., m, n) an op that writes `out`.

    torch.vmap adds a dimension in front, which is one more of a batch.
    """
    op = torch.library.custom_op(
        add_op_namespace_prefix(name), function, mutates_args=("out",), schema=schema
    )

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
