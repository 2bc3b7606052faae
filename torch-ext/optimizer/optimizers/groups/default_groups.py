"""Module types, names and shapes -> groups for Muon and for AdamW, and how fused ones are cut."""

from __future__ import annotations

import dis
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...dispatch import say_once
from .parameters import check_initialized, components, has_component

logger = logging.getLogger(__name__)

EXPERTS = "experts"
MUON, ADAMW = "muon", "adamw"
UNPACK_SEQUENCE = dis.opmap["UNPACK_SEQUENCE"]
# GPT-2's and RWKV's names; other tables say "embed" or "_emb", or are among TOP_LEVEL.
TOKEN_TABLES = frozenset({"wte", "wpe", "emb"})
HEADS = frozenset({"lm_head", "unembed", "classifier"})
# Words that name the head at the top of a model, or the table there (T5, BART), and an ordinary
# projection inside a layer.
TOP_LEVEL = frozenset({"output", "head", "heads", "score", "proj_out", "output_layer", "shared"})
# Fused projections.
ATTENTION = frozenset({"c_attn", "qkv_proj"})
GATED = "gate_up_proj"
OF_TORCH = "in_proj_weight"  # Q, K and V of torch.nn.MultiheadAttention
# Of which some keep Q, K and V head by head, which neither name nor shape tell.
UNKNOWN = frozenset({"query_key_value", "qkv", "wqkv", "Wqkv", "W_pack"})


def default_is_muon(name: str, param: Tensor) -> bool:
    """Whether a parameter is a hidden matrix, as far as its name and shape tell.

    Matrices, convolution filters (4 dimensions and more) and stacks of experts (3 dimensions and a
    name component `experts`) are. Embeddings, output heads, norms, biases, factors of LoRA
    (`lora_A`, `lora_B`), other 3-D parameters, what has fewer than 2 dimensions, and matrices of
    one row or column, which are vectors (heads of one output, magnitudes of weight_norm), are not.
    `output`, `head` and the like are heads, and `shared` a table, only outside numbered layers,
    since `layers.0.attention.output` is an ordinary projection.
    `get_default_muon_param_groups` looks at the module types first, which is safer.

    Args:
        name: qualified name, as from `model.named_parameters()`.
        param: the parameter.
    """
    parts = components(name)
    if param.ndim < 2 or any(part.endswith("bias") for part in parts):
        return False
    if any(part.startswith("lora_") for part in parts):
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
    return numbered or not TOP_LEVEL.intersection(owners)


class Groups(list[dict[str, Any]]):
    """Groups for Muon, for AdamW, and for AdamW without decay."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """As a list's, but unpacking into two names says what the third group is.

        Python's own message gives a number alone, and Motif's function returns two groups.
        """
        caller = sys._getframe(1)
        code, at = caller.f_code.co_code, caller.f_lasti
        if code[at] == UNPACK_SEQUENCE and code[at + 1] == 2 < len(self):
            raise ValueError(
                "get_default_muon_param_groups returns three groups: muon, adamw, and adamw "
                "without weight decay (vectors and embeddings); unpack three, or pass "
                "no_decay=False for two"
            )
        return super().__iter__()

    def table(self) -> str:
        """One line per parameter: the group that it is in, its shape, and how it is cut."""
        lines = []
        for group in list.__iter__(self):
            kind = MUON if group["use_muon"] else ADAMW
            if group.get("weight_decay") == 0.0:
                kind += ", no decay"
            for name, param in zip(group["names"], group["params"], strict=True):
                cut = group.get("split_sizes", {}).get(name)
                stacked = param.ndim == 3 and group.get("expert_keys")
                side = "columns" if group.get("transposed") else "rows"
                notes = [f"{side} {cut}"] if cut else []
                notes += [f"{param.shape[0]} matrices"] if stacked else []
                lines.append((kind, str(tuple(param.shape)), name, "; ".join(notes)))
        widths = [max((len(line[k]) for line in lines), default=0) for k in range(3)]
        padded = ("  ".join((*map(str.ljust, line[:3], widths), line[3])) for line in lines)
        return "\n".join(line.rstrip() for line in padded)


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[[str, Tensor], bool] = default_is_muon,
    *,
    adamw_lr: float | Tensor | None = None,
    no_decay: bool = True,
    split_fused: bool = True,
) -> Groups:
    """Split the trainable parameters of a model into groups for Muon and for AdamW.

    By default the type of a module decides first: embeddings, output heads (tied to an embedding or
    not) and norms go to AdamW whatever their names; then `default_is_muon` decides. A head is what
    `model.get_output_embeddings()` returns, and any Linear outside the layers with as many outputs
    as an embedding has rows, or up to twice as many (vocabularies are padded). A tied parameter
    appears once. Another `is_muon_func` decides alone. The split is logged at INFO as a table,
    which `table()` of the result returns.

    Args:
        model: any module, also compiled or wrapped for checkpointing or DDP.
        is_muon_func: (name, parameter) -> True for Muon.
        adamw_lr: lr of the groups for AdamW; None leaves it to the optimizer.
        no_decay: put what has fewer than 2 dimensions, and embeddings, into a third group, for
            AdamW with weight_decay 0.
        split_fused: give the Muon group `split_sizes` for fused projections whose parts are known:
            Q, K and V of `torch.nn.MultiheadAttention`, `c_attn` and `qkv_proj`, and `gate_up_proj`
            of a Linear or of a stack of experts. What is called so and not split is logged.

    Returns:
        A list: `{"params", "names", "use_muon": True}`, `{..., "use_muon": False}` and, with
        `no_decay`, `{..., "use_muon": False, "weight_decay": 0.0}`. The first also carries
        `expert_keys` where it holds 3-D stacks of experts, and `transposed` where it holds nothing
        but weights (in, out) of transformers' Conv1D (GPT-2). If a model has matrices of both
        kinds, those of Conv1D are in a further group, the last. Groups may be empty.

    Raises:
        TypeError: `model` is not a module.
        ValueError: a lazy module of it was not run yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; write the groups "
            "yourself for a list of parameters"
        )
    for name, param in model.named_parameters():
        check_initialized(param, name)
    by_type = _not_muon_by_type(model) if is_muon_func is default_is_muon else set()
    tables = _tables(model)
    groups = Groups(
        {"params": [], "names": [], "use_muon": use_muon} for use_muon in (True, False, False)
    )
    muon, adamw, undecayed = list.__iter__(groups)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        chosen = adamw
        if param not in by_type and is_muon_func(name, param):
            chosen = muon
        elif no_decay and (param.ndim < 2 or param in tables or _is_table(name)):
            chosen = undecayed
        chosen["params"].append(param)
        chosen["names"].append(name)
    stacks = (p.ndim == 3 and has_component(n, EXPERTS) for p, n in zip(*_lists(muon), strict=True))
    if any(stacks):
        muon["expert_keys"] = (EXPERTS,)
    if split_fused and (fused := fused_projections(model, dict(zip(*_lists(muon), strict=True)))):
        muon["split_sizes"] = fused
    undecayed["weight_decay"] = 0.0
    if not no_decay:
        groups.pop()
    if adamw_lr is not None:
        for group in groups[1:]:
            group["lr"] = adamw_lr
    _mark_transposed(groups, model)
    logger.info("parameter groups:\n%s", groups.table())
    return groups


def _mark_transposed(groups: Groups, model: nn.Module) -> None:
    """Matrices (in, out) of Conv1D: all of the group for Muon, or else a group of their own."""
    muon = groups[0]
    found = {module.weight for module in model.modules() if is_transposed(module)}
    if not found.intersection(muon["params"]):
        return
    if found.issuperset(muon["params"]):
        muon["transposed"] = True
        return
    entries = [*zip(*_lists(muon), strict=True)]
    own = {"use_muon": True, "transposed": True}
    for group, wanted in ((own, True), (muon, False)):
        kept = [entry for entry in entries if (entry[0] in found) == wanted]
        group["params"], group["names"] = [p for p, _ in kept], [name for _, name in kept]
    if sizes := muon.pop("split_sizes", None):
        for group in (own, muon):
            if of_group := {name: sizes[name] for name in group["names"] if name in sizes}:
                group["split_sizes"] = of_group
    groups.append(own)


def _lists(group: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    return group["params"], group["names"]


def _names_table_or_norm(part: str) -> bool:
    return (
        part in TOKEN_TABLES
        or "embed" in part
        or part.endswith(("_emb", "norm"))
        or part.startswith("norm")
    )


def _is_table(name: str) -> bool:
    owners = components(name)[:-1] or components(name)
    return any(part.lower() in TOKEN_TABLES or "embed" in part.lower() for part in owners)


def _tables(model: nn.Module) -> set[Tensor]:
    """Parameters of embeddings."""
    return {
        param
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in _own_parameters(module)
    }


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


def fused_projections(model: nn.Module, names: Mapping[Tensor, str]) -> dict[str, tuple[int, ...]]:
    """Name -> row counts of the fused projections among these parameters.

    What has the name of one and is not known to be cut by rows is logged.
    """
    found: dict[str, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight in names:
                found[names[module.in_proj_weight]] = (module.embed_dim,) * 3
            continue
        for called, part in [*module.named_children(), *module.named_parameters(recurse=False)]:
            weight = part if isinstance(part, Tensor) else getattr(part, "weight", None)
            if called not in ATTENTION | UNKNOWN | {GATED} or weight not in names:
                continue
            sizes = None
            if weight.ndim == 2 or _is_concatenated(module, tuple(weight.shape)):
                shape = weight.shape[::-1] if is_transposed(part) else weight.shape
                sizes = _sizes(called, tuple(shape), _head_counts(module))
            if sizes is not None:
                found[names[weight]] = sizes
            else:
                logger.warning(
                    "%s %s looks fused, and is taken as one matrix: its parts are not known to be "
                    "runs of rows. Give it to AdamW, or split_sizes to the Muon group",
                    ".".join(components(names[weight])),
                    tuple(weight.shape),
                )
    return found


def fused_by_names(named: Mapping[str, Tensor], transposed: bool) -> dict[str, tuple[int, ...]]:
    """`fused_projections` as far as names and shapes tell, without heads or types of modules.

    That Q, K and V are equal, by three times as many rows as columns, is a guess that is logged. So
    is what they do not tell, in one line: weights (in, out) of Conv1D, fewer heads of keys
    than of queries, stacks without their down_proj.
    """
    found, unknown = {}, []
    for name, param in named.items():
        called = components(name.removesuffix(".weight"))[-1]
        if called not in ATTENTION | UNKNOWN | {GATED, OF_TORCH}:
            continue
        shape, down = tuple(param.shape), named.get(name.removesuffix(GATED) + "down_proj")
        sizes = None
        stacked = down is not None and not transposed and _fit(shape, tuple(down.shape))
        if len(shape) == 2 or stacked:
            sizes = _sizes(called, shape[::-1] if transposed else shape)
        if sizes is None:
            unknown.append(f"{'.'.join(components(name))} {shape}")
        else:
            found[name] = sizes
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        say_once(
            "%s%s looks fused, and is taken as one matrix, since its name and shape do not tell "
            "its parts: pass get_default_muon_param_groups(model), which sees the modules, or give "
            "split_sizes to the Muon group",
            unknown[0],
            more,
        )
    if found:
        logger.info("fused projections are cut, by their names: %s", found)
    guessed = [n for n in found if components(n.removesuffix(".weight"))[-1] in ATTENTION]
    if guessed:
        more = f", and {len(guessed) - 1} more likewise" if len(guessed) > 1 else ""
        say_once(
            "%s %s is cut into %s rows, as Q, K and V of equal heads%s, since names do not tell "
            "how many heads there are: pass get_default_muon_param_groups(model), which sees the "
            "modules, or give split_sizes to the Muon group if the parts are others",
            ".".join(components(guessed[0])),
            tuple(named[guessed[0]].shape),
            found[guessed[0]],
            more,
        )
    return found


def _sizes(
    called: str, shape: tuple[int, ...], heads: tuple[int, int, int] = (0, 0, 0)
) -> tuple[int, ...] | None:
    """Rows of the parts of a projection (..., out, in) that its owner calls `called`."""
    rows, columns = shape[-2:]
    if called == GATED:
        return None if rows % 2 else (rows // 2,) * 2
    if len(shape) != 2 or called in UNKNOWN:
        return None
    of_queries, of_keys, size = heads
    if of_queries and size and (of_queries + 2 * of_keys) * size == rows:
        return of_queries * size, of_keys * size, of_keys * size
    return (columns,) * 3 if rows == 3 * columns else None


def is_transposed(part: Any) -> bool:
    """Whether a module keeps (in, out), as Conv1D of GPT-2 does; convolutions of that name do not.

    Theirs have a weight of three dimensions, or none where they wrap another module.
    """
    weight = getattr(part, "weight", None)
    return type(part).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2


def _is_concatenated(experts: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a stack (E, 2 intermediate, hidden) has the gates before the rest in its rows."""
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, Tensor) or not getattr(experts, "is_concatenated", True):
        return False
    return _fit(shape, tuple(down.shape))


def _fit(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether stacks are (E, 2 intermediate, hidden) and (E, hidden, intermediate)."""
    return len(gate_up) == 3 and down == (gate_up[0], gate_up[2], gate_up[1] // 2)


def _head_counts(attention: nn.Module) -> tuple[int, int, int]:
    """(query heads, key heads, rows of a head), 0 for what neither it nor its config says."""

    def said(*names: str) -> int:
        for holder in (attention, getattr(attention, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        return 0

    heads = said("num_attention_heads", "num_heads", "n_head", "n_heads")
    return heads, said("num_key_value_heads", "n_kv_head", "n_kv_heads") or heads, said("head_dim")
