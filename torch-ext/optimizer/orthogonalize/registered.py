"""The short way past a registered op of Python.

A compiler has to see an iteration as one op, or it would trace every slice of a batch. Called
eagerly, such an op costs the host 45 us of torch's wrappers for autograd and aliasing, once per
shape and step; the function behind it gives the same bits without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call(
    op: Callable[..., None],
    function: Callable[..., None],
    x: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
) -> None:
    """Call the op where a compiler or a subclass of Tensor has to see it, else its function.

    Args:
        op: registered for `function`.
        function: (x, out, ...) -> None, which writes `out`.
        x: input of both.
        out: output of both.
        rest: further arguments of both.
    """
    if torch.compiler.is_compiling() or {type(x), type(out)} != {torch.Tensor}:
        op(x, out, *rest)
        return
    function(x, out, *rest)
    torch.autograd.graph.increment_version(out)  # as the op does: autograd must know
