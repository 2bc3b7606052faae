"""Products that communicate, for layers whose weights are cut over the ranks of a group.

    shard -> all-gather + matmul | matmul + reduce-scatter

matmul        the two halves and their scaled forms, differentiable, for any dimension
ops           the same on matrices, as registered operations, fused or plain
fused         torch's pipelined products over symmetric memory, and when they serve
pipelined     a product that begins before the rows of other ranks are there
products      float8 operands, their scales and their product
collectives   the plain collectives
report        which path each call took and why; the error of `strict`
graph         what torch's own fusion left of a compiled graph
newton_schulz one matrix whose rows lie on several ranks -> its polar factor
"""

from .graph import assert_async_tp_fused
from .matmul import (
    all_gather_matmul,
    all_gather_scaled_matmul,
    matmul_reduce_scatter,
    scaled_matmul_reduce_scatter,
)
from .pipelined import PipelinedAllGatherMatmul
from .report import CommRecord, comm_report, reset_comm_report
from .scaled_matmul import scaled_matmul
from .sharded_newton_schulz import sharded_newton_schulz

__all__ = [
    "CommRecord",
    "PipelinedAllGatherMatmul",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "assert_async_tp_fused",
    "comm_report",
    "matmul_reduce_scatter",
    "reset_comm_report",
    "scaled_matmul",
    "scaled_matmul_reduce_scatter",
    "sharded_newton_schulz",
]
