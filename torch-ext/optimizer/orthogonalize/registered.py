"""Iterations as registered ops, and the short way past them.

A compiler has to see an iteration as one op, or it would trace every slice of a batch. Called
eagerly, an op of Python costs the host 45 us of torch's wrappers for autograd and aliasing, once
per shape and step; the function behind it gives the same bits without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ops import add_op_namespace_prefix, ops


def registered(name: str, schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function (x, out, ...) -> None, which writes `out`, as an op of this package.

    What takes its place calls the op where a compiler or a subclass of Tensor has to see it, and
    the function itself elsewhere.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        qualified = add_op_namespace_prefix(name)
        torch.library.custom_op(qualified, function, mutates_args=("out",), schema=schema)

        def call(x: torch.Tensor, out: torch.Tensor, *rest: Any) -> None:
            if torch.compiler.is_compiling() or {type(x), type(out)} != {torch.Tensor}:
                getattr(ops, name)(x, out, *rest)
                return
            function(x, out, *rest)
            torch.autograd.graph.increment_version(out)  # as the op does: autograd must know

        return call

    return register
