"""The error of a fast way of communicating that was insisted on and cannot be had."""

from __future__ import annotations


class CommUnavailable(RuntimeError):  # noqa: N818
    """What `strict` raises where a slower transport, or a product beside it, would have run.

    Attributes:
        reason: Why, in a sentence; equal reasons are equal strings.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.reason,)
