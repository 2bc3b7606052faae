"""Which dotted name an expression stands for, as far as a file's own imports tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, from every absolute import of the file.

    `import torch.distributed as dist` gives dist -> torch.distributed; `import torch.cuda` binds
    torch; `from torch import library` gives library -> torch.library. Scopes are not told apart.
    """
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                root = name.name.split(".")[0]
                found[name.asname or root] = name.name if name.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """`dist.all_reduce` -> "torch.distributed.all_reduce"; None for anything but a chain of names.

    A first name that the file did not import stays as it is written.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(known.get(node.id, node.id))
    return ".".join(reversed(parts))


def executed_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that runs when the file is imported: all but the bodies of functions.

    Decorators, default values and class bodies do run.
    """
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.decorator_list + node.args.defaults
            waiting += [default for default in node.args.kw_defaults if default is not None]
        elif isinstance(node, ast.Lambda):
            waiting += node.args.defaults
        else:
            waiting += ast.iter_child_nodes(node)


def in_functions(tree: ast.Module) -> set[ast.AST]:
    """Nodes that run only when a function is called."""
    at_import = set(executed_at_import(tree))
    return {node for node in ast.walk(tree) if node not in at_import}
