"""Copies between GPUs that take no multiprocessor, and the signals that order them."""

from .push import push
from .signals import memset32, stream_write_value32, wait_signals

__all__ = ["memset32", "push", "stream_write_value32", "wait_signals"]
