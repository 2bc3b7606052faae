"""Names and shapes -> the parameters Muon orthogonalizes, and those AdamW takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

logger = logging.getLogger(__name__)

# Components that wrappers put into names: torch.compile, activation checkpointing, FSDP1.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
EXPERTS = "experts"
TOKEN_TABLES = frozenset({"wte", "wpe"})  # GPT-2's names; every other table says "embed" or "_emb"
HEADS = frozenset({"lm_head", "unembed", "classifier"})
# Words that name the head at the top of a model and an ordinary projection inside a layer.
TOP_LEVEL_HEADS = frozenset({"output", "head", "heads", "score", "proj_out", "output_layer"})


def components(name: str) -> list[str]:
    """The parts of a qualified name without those that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:  # DistributedDataParallel
        del parts[0]
    return parts


def has_component(name: str, key: str) -> bool:
    """Whether `key` occurs in `name` as whole components; `shared_experts.w1` has no `experts`."""
    parts, wanted = components(name), key.split(".")
    last = len(parts) - len(wanted)
    return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))


def default_is_muon(name: str, param: Tensor) -> bool:
    """Whether a parameter is a hidden matrix, as far as its name and shape tell.

    Matrices, convolution filters (4 dimensions and more) and stacks of experts (3 dimensions and a
    name component `experts`) are; embeddings, output heads, norms, biases, other 3-D parameters,
    what has fewer than 2 dimensions and matrices of one row or column, which are vectors (heads of
    one output, magnitudes of weight_norm), are not. `output`, `head` and the like are heads only
    outside numbered layers, since `layers.0.attention.output` is an ordinary projection.
    `get_default_muon_param_groups` looks at the module types first, which is safer.

    Args:
        name: qualified name, as from `model.named_parameters()`.
        param: the parameter.
    """
    parts = components(name)
    if param.ndim < 2 or parts[-1].endswith("bias"):
        return False
    if param.ndim == 3 and EXPERTS not in parts:
        return False
    rows, *columns = param.shape[1:] if param.ndim == 3 else param.shape
    if rows == 1 or math.prod(columns) == 1:
        return False
    owners = [part.lower() for part in (parts[:-1] or parts)]
    if any(_names_table_or_norm(part) or part in HEADS for part in owners):
        return False
    numbered = any(part.isdigit() for part in parts)
    return numbered or not TOP_LEVEL_HEADS.intersection(owners)


def get_default_muon_param_groups(
    model: nn.Module, is_muon_func: Callable[[str, Tensor], bool] = default_is_muon
) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into a group for Muon and one for AdamW.

    By default the type of a module decides first: embeddings, output heads (tied to an embedding or
    not) and norms go to AdamW whatever their names; then `default_is_muon` decides. A head is what
    `model.get_output_embeddings()` returns, and any Linear outside the layers with as many outputs
    as an embedding has rows, or up to twice as many (vocabularies are padded). A tied parameter
    appears once. Another `is_muon_func` decides alone. The split is logged at INFO.

    Args:
        model: any module, also compiled or wrapped for checkpointing or DDP.
        is_muon_func: (name, parameter) -> True for Muon.

    Returns:
        `[{"params", "names", "use_muon": True}, {"params", "names", "use_muon": False}]`. The first
        also carries `expert_keys` where it holds 3-D stacks of experts, and `split_sizes` for the
        fused Q, K and V of `torch.nn.MultiheadAttention`. Groups may be empty.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; write the groups "
            "yourself for a list of parameters"
        )
    by_type = _not_muon_by_type(model) if is_muon_func is default_is_muon else set()
    muon: dict[str, Any] = {"params": [], "names": [], "use_muon": True}
    adamw: dict[str, Any] = {"params": [], "names": [], "use_muon": False}
    for name, param in model.named_parameters():
        if param.requires_grad:
            chosen = muon if param not in by_type and is_muon_func(name, param) else adamw
            chosen["params"].append(param)
            chosen["names"].append(name)
    stacks = (p.ndim == 3 and has_component(n, EXPERTS) for p, n in zip(*_lists(muon), strict=True))
    if any(stacks):
        muon["expert_keys"] = (EXPERTS,)
    if fused := _fused_projections(model, muon):
        muon["split_sizes"] = fused
    logger.info("to Muon: %s; to AdamW: %s", *(", ".join(g["names"]) for g in (muon, adamw)))
    return [muon, adamw]


def _lists(group: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    return group["params"], group["names"]


def _names_table_or_norm(part: str) -> bool:
    return (
        part in TOKEN_TABLES
        or "embed" in part
        or part.endswith(("_emb", "norm"))
        or part.startswith("norm")
    )


def _fused_projections(model: nn.Module, muon: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Rows of Q, K and V in the one parameter that torch's own attention keeps them in."""
    fused = {
        module.in_proj_weight: (module.embed_dim,) * 3
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None
    }
    return {name: fused[p] for p, name in zip(*_lists(muon), strict=True) if p in fused}


def _not_muon_by_type(model: nn.Module) -> set[Tensor]:
    """Parameters of embeddings, heads and norms; a weight tied to one of these is the same one."""
    found: set[Tensor] = set()
    vocabularies: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            vocabularies.add(module.num_embeddings)
            found.update(_own_parameters(module))
        elif type(module).__name__.lower().endswith("norm"):
            found.update(_own_parameters(module))
    for head in _heads(model, vocabularies):
        found.update(_own_parameters(head))
    return found


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """A module's parameters without those of its children; a parametrization is no child."""
    yield from module.parameters(recurse=False)
    if is_parametrized(module):
        yield from module.parametrizations.parameters()


def _heads(model: nn.Module, vocabularies: set[int]) -> Iterator[nn.Module]:
    """What the model declares as its head, and Linears onto a vocabulary that are in no layer."""
    getter = getattr(model, "get_output_embeddings", None)  # transformers
    if callable(getter):
        try:
            head = getter()
        except NotImplementedError:
            head = None
        if isinstance(head, nn.Module):
            yield head
    # Of wrappers and what they wrap, which share a path, the innermost is last and stays.
    modules = {_path(name): module for name, module in model.named_modules()}
    for path, module in modules.items():
        outputs = getattr(module, "out_features", None)
        # Padding, to a multiple of 64 or 128, less than doubles any vocabulary worth padding. A
        # bound keeps tables of a few rows (token types) from making every Linear a head.
        onto_vocabulary = isinstance(outputs, int) and any(
            rows <= outputs < 2 * rows for rows in vocabularies
        )
        if onto_vocabulary and not _in_layer(path, modules):
            yield module


def _path(name: str) -> tuple[str, ...]:
    """The components of a module's name, () for the model itself."""
    return tuple(components(f"{name}.weight" if name else "weight")[:-1])


def _in_layer(path: tuple[str, ...], modules: Mapping[tuple[str, ...], nn.Module]) -> bool:
    """Whether a Linear is part of a numbered block, or one itself, rather than the end of a model.

    The last Linear of a Sequential can be a head: Sequential(Embedding, ..., Linear).
    """
    parent = path[:-1]
    if any(part.isdigit() for part in parent):
        return True
    if isinstance(modules[parent], nn.Sequential):
        siblings = [p for p in modules if p[:-1] == parent and hasattr(modules[p], "out_features")]
        return path != siblings[-1]
    return bool(path) and path[-1].isdigit()
