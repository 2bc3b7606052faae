"""What torch's own fusion of tensor parallelism left of a compiled graph, and why.

`torch._inductor.config._micro_pipeline_tp` rewrites an all-gather before a product, and a
reduce-scatter behind one, to the fused operations. What it cannot rewrite it leaves as it is, at
most with a line in the log; a group that was not enabled it skips without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, fx
from torch.distributed import _symmetric_memory as symmetric_memory

from .fused import LEAST_COLUMNS

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
GATHERS = (_c10d.all_gather_into_tensor.default,)
SCATTERS = (_c10d.reduce_scatter_tensor.default,)
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default)
SCALED = _aten._scaled_mm.default
FUSED = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)
# What may stand between a collective and a product without being one: no arithmetic.
_MOVES = frozenset(
    {
        *("_to_copy", "_unsafe_view", "alias", "cat", "clone", "convert_element_type", "expand"),
        *("force_stride_order", "getitem", "permute", "reshape", "slice", "split"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view", "wait_tensor"),
    }
)


def assert_async_tp_fused(gm: fx.GraphModule | fx.Graph, group: Any = None) -> int:
    """Check that torch's fusion left no collective of a product in a graph.

    Of a compiled model: hand it to the compiler as `post_grad_custom_post_pass` of
    `torch._inductor.config`, which gets the graph behind the fusion.

    Args:
        gm: The graph after `micro_pipeline_tp_pass`.
        group: Name of the group whose collectives count, or a ProcessGroup; None: those of all.

    Returns:
        The number of fused operations of the graph.

    Raises:
        AssertionError: A gathered tensor that is multiplied, or a product that is scattered, is not
            fused, with the reason for each; or the graph has nothing of either kind.
    """
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    name = getattr(group, "group_name", group)
    fused = sum(_name_of(node) in FUSED for node in graph.nodes)
    left = [
        f"{node.name} ({_name_of(node)}): {reason}"
        for node in graph.nodes
        if name is None or _group_of(node) == name
        if (reason := _why_left(node)) is not None
    ]
    if left:
        raise AssertionError(
            f"{len(left)} collectives of products are not fused, {fused} are:\n" + "\n".join(left)
        )
    if not fused:
        raise AssertionError(
            "the graph has no all-gather before a product and no reduce-scatter behind one, fused "
            "or not: the collectives are in another graph, or no functional ones (DTensor's, or "
            "torch.distributed._functional_collectives')"
        )
    return fused


def _why_left(node: fx.Node) -> str | None:
    """Why a collective beside a product was not fused; None for any other node."""
    if node.target in GATHERS:
        path = next(_products_after(node), None)
        return None if path is None else _disabled(node) or _why_gather_left(node, path)
    if node.target in SCATTERS:
        product, dim = _product_before(node)
        return None if product is None else _disabled(node) or _why_scatter_left(node, product, dim)
    return None


def _disabled(node: fx.Node) -> str | None:
    """Why the pass looks at no collective of this kind at all."""
    if not distributed.is_nccl_available():
        return "torch was built without NCCL, without which the pass does nothing"
    group = _group_of(node)
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):
        return (
            f"symmetric memory is not enabled for the group {group!r}; call "
            "torch.distributed._symmetric_memory.enable_symm_mem_for_group with its name"
        )
    return None


def _why_gather_left(node: fx.Node, path: tuple[fx.Node, ...]) -> str:
    product, before = path[-1], path[-2]
    left = product.args[1 if product.target is _aten.addmm.default else 0]
    if left is not before:
        return f"{product.name} multiplies by the gathered tensor from the right"
    if product.target is _aten.bmm.default or product.target is _aten.addmm.default:
        return f"the pass knows mm and _scaled_mm, and {product.name} is of {_name_of(product)}"
    dim, shard = _cut_dim(path), _shape(node.args[0])
    if shard is not None and dim == len(shard) - 1:
        if product.target is SCALED:
            return "gathered along the last dimension, scaled products have no fused form"
        if shard[-1] < LEAST_COLUMNS:
            return (
                f"gathered along the last dimension, shards of {shard[-1]} columns are below the "
                f"{LEAST_COLUMNS} from which the pass fuses"
            )
    return f"the operations between it and {product.name} match no pattern of the pass: " + (
        ", ".join(_name_of(other) for other in path[:-1])
    )


def _why_scatter_left(node: fx.Node, product: fx.Node, dim: int) -> str:
    shape = _shape(product)
    if product.target is _aten.bmm.default or product.target is _aten.addmm.default:
        return f"the pass knows mm and _scaled_mm, and {product.name} is of {_name_of(product)}"
    readers = [user for user in product.users if not _leads_to(user, node)]
    if readers:
        return f"{product.name} has another reader, {readers[0].name}"
    if product.target is SCALED and shape is not None and dim > 0:
        return "scattered along the last dimension, scaled products have no fused form"
    return f"the operations between {product.name} and it match no pattern of the pass"


def _products_after(node: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """The ways from a node to products that read it, through nodes that move elements alone."""
    ways = [(user,) for user in node.users]
    while ways:
        way = ways.pop(0)
        if way[-1].target in PRODUCTS:
            yield way if len(way) > 1 else (node, *way)
        elif _name_of(way[-1]) in _MOVES:
            ways += [(*way, user) for user in way[-1].users]


def _product_before(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The product whose elements alone a node reads, and the dimension that was cut on the way."""
    dim, at = 0, node.args[0]
    while isinstance(at, fx.Node):
        if at.target in PRODUCTS:
            return at, dim
        if _name_of(at) not in _MOVES:
            return None, dim
        if _name_of(at) in ("split", "split_with_sizes") and len(at.args) > 2:
            dim = at.args[2]
        if _name_of(at) == "slice" and len(at.args) > 1:
            dim = at.args[1]
        first = at.args[0]
        at = first[0] if isinstance(first, (list, tuple)) else first
    return None, dim


def _leads_to(node: fx.Node, end: fx.Node) -> bool:
    seen, ways = {node}, [node]
    while ways and end not in seen:
        new = [user for user in ways.pop().users if user not in seen]
        seen.update(new)
        ways += new
    return end in seen


def _cut_dim(path: tuple[fx.Node, ...]) -> int:
    """The dimension that a gathered tensor was put together along: of its `cat`, or the first."""
    for node in path:
        if _name_of(node) == "cat":
            return node.args[1] if len(node.args) > 1 else 0
    return 0


def _group_of(node: fx.Node) -> str | None:
    """The name of the group of a collective: its last argument."""
    if node.target not in (*GATHERS, *SCATTERS):
        return None
    return node.kwargs.get("group_name", node.args[-1] if node.args else None)


def _shape(node: Any) -> tuple[int, ...] | None:
    value = (
        node.meta.get("val", node.meta.get("tensor_meta")) if isinstance(node, fx.Node) else None
    )
    return None if value is None else tuple(value.shape)


def _name_of(node: fx.Node) -> str:
    """A node's operation without its namespace and overload."""
    if node.op != "call_function":
        return node.op
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")
    return name
