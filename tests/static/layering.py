"""Who may import whom, as data, and the checks that read it off the source."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .project import aliases, dotted, in_functions, parse, place

# A layer is a sub-package, or a module that lies directly in the package. It may import itself and
# what stands here; `reference` is open to all. "kernels.communication" opens that of a layer alone.
ARROWS: dict[str, frozenset[str]] = {
    "_ops": frozenset(),  # generated: the namespace of the compiled ops
    "reference": frozenset(),
    "dispatch": frozenset({"_ops"}),
    "kernels": frozenset({"_ops", "dispatch"}),
    # _ops: newton_schulz, gram_newton_schulz and gram_polynomial are registered ops themselves
    "orthogonalize": frozenset({"kernels", "dispatch", "_ops"}),
    "distributed": frozenset({"kernels.communication"}),
    # _ops: its products that communicate are registered ops; dispatch: what is said once
    "tensor_parallel": frozenset({"distributed", "orthogonalize", "kernels", "dispatch", "_ops"}),
    "optimizers": frozenset(
        {"orthogonalize", "distributed", "kernels", "tensor_parallel", "dispatch"}
    ),
    "moe": frozenset({"kernels", "dispatch"}),
    "integrations": frozenset({"moe", "optimizers"}),
    "layers": frozenset({"moe"}),
    "explain": frozenset({"orthogonalize", "kernels", "dispatch"}),
}
FACADE = "__init__"  # the package's own __init__.py, which may import every layer

# Users of a layer that see its __init__ only, so that its modules can be rearranged.
PACKAGE_ONLY: frozenset[tuple[str, str]] = frozenset({("optimizers", "distributed")})

COLLECTIVES_ALLOWED = (
    "distributed.nccl_ce",
    "distributed.symmetric",
    "distributed.transport",
    "tensor_parallel",
)
COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "distribute_tensor",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
    }
)
COMMUNICATION_MODULES = (
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.nn",
    "torch.ops._c10d_functional",
    "torch.ops.c10d",
    "torch.ops.c10d_functional",
    "torch.ops.symm_mem",
)
# Methods of DTensor and ProcessGroup that communicate, under names that nothing else uses.
COLLECTIVE_METHODS = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allgather_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "full_tensor",
        "redistribute",
    }
)

FOREIGN_ALLOWED = "integrations"
OWN_IMPORTS = frozenset({"torch", "triton"})
TRITON_SUFFIX = "_triton"


@dataclass(frozen=True)
class Import:
    """One imported module. `target` is dotted; for our own modules it starts after the package."""

    importer: str  # "optimizers.muon"; "__init__" for the package itself
    where: str  # "optimizers/muon.py:12"
    target: str
    own: bool
    lazy: bool  # runs only when a function is called


class Tree:
    """The modules of a package folder, by dotted name, parsed once."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files: dict[str, Path] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.files[name or FACADE] = path
        self.sources = {name: parse(path) for name, path in self.files.items()}
        self.faults: list[str] = []  # imports that lead nowhere
        self.imports = [found for name in self.files for found in self._imports_of(name)]

    def knows(self, module: str) -> bool:
        return module in self.files or module == "_ops"

    def layers(self) -> set[str]:
        return {name.split(".")[0] for name in self.files} | {"_ops"}

    def where(self, module: str, node: ast.AST) -> str:
        return place(self.files[module], self.package, node.lineno)

    def _imports_of(self, module: str) -> Iterator[Import]:
        source = self.sources[module]
        deferred = in_functions(source)
        for node in ast.walk(source):
            if isinstance(node, ast.Import):
                targets = [(name.name, False) for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                targets = [(f"{node.module}.{name.name}", False) for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [(target, True) for target in self._relative(module, node)]
            else:
                continue
            where = self.where(module, node)
            for target, own in targets:
                yield Import(module, where, target, own, lazy=node in deferred)

    def _relative(self, module: str, node: ast.ImportFrom) -> Iterator[str]:
        """The modules of ours that `from ..folder import a, b` names."""
        parts = [] if module == FACADE else module.split(".")
        is_package = self.files[module].name == "__init__.py"
        parents = parts if is_package else parts[:-1]
        climb = node.level - 1
        if climb > len(parents):
            self.faults.append(f"{self.where(module, node)}: climbs out of the package")
            return
        base = [*parents[: len(parents) - climb], *(node.module or "").split(".")]
        base_name = ".".join(part for part in base if part)
        if base_name and not self.knows(base_name):
            self.faults.append(f"{self.where(module, node)}: there is no module {base_name}")
            return
        for name in node.names:
            inner = f"{base_name}.{name.name}".lstrip(".")
            yield inner if self.knows(inner) else base_name or FACADE


def arrow_findings(tree: Tree) -> list[str]:
    """Imports against the arrows, modules in no layer, and relative imports that lead nowhere."""
    findings = list(tree.faults)
    for layer in sorted(tree.layers() - set(ARROWS) - {FACADE}):
        findings.append(f"{layer}: belongs to no layer; add it to ARROWS and to the drawing")
    for found in tree.imports:
        source, target = found.importer.split(".")[0], found.target.split(".")[0]
        if not found.own or source == FACADE or target in (source, "reference"):
            continue
        allowed = ARROWS.get(source, frozenset())
        if target == FACADE:
            findings.append(f"{found.where}: {source} imports the package's __init__")
        elif not _covered(found.target, allowed):
            may = ", ".join(sorted(allowed | {"reference"}))
            findings.append(f"{found.where}: {source} imports {found.target}; it may import {may}")
        elif (source, target) in PACKAGE_ONLY and found.target != target:
            findings.append(
                f"{found.where}: {source} reaches into {found.target}; import from {target} itself"
            )
    return findings


def absolute_findings(tree: Tree) -> list[str]:
    """The package's own name in an absolute import: it is loaded under another one."""
    name = tree.package.name
    return [
        f"{found.where}: absolute import of {found.target}; imports inside are relative"
        for found in tree.imports
        if not found.own and found.target.split(".")[0] == name
    ]


def foreign_findings(tree: Tree) -> list[str]:
    """Imports of anything but the standard library, torch and triton.

    `integrations` may make them inside functions. Imports by a computed name are refused outside
    of it, because no test could read them.
    """
    findings = []
    for found in tree.imports:
        top = found.target.split(".")[0]
        known = found.own or top in OWN_IMPORTS or top in sys.stdlib_module_names
        if known or top == tree.package.name:
            continue
        if found.importer.split(".")[0] != FOREIGN_ALLOWED:
            findings.append(f"{found.where}: imports {top}; only {FOREIGN_ALLOWED} may")
        elif not found.lazy:
            findings.append(f"{found.where}: imports {top} at module level; do it in a function")
    for module, source in tree.sources.items():
        if module.split(".")[0] == FOREIGN_ALLOWED:
            continue
        known_names = aliases(source)
        findings += [
            f"{tree.where(module, node)}: imports by a computed name"
            for node in ast.walk(source)
            if isinstance(node, ast.Call)
            and dotted(node.func, known_names) in ("importlib.import_module", "__import__")
        ]
    return findings


def triton_findings(tree: Tree) -> list[str]:
    """Triton reached while the package is imported: CPU builds of torch come without it."""
    findings = []
    for found in tree.imports:
        if found.lazy or found.importer.endswith(TRITON_SUFFIX):
            continue
        if not found.own and found.target.split(".")[0] == "triton":
            findings.append(f"{found.where}: imports triton outside a function and a *_triton.py")
        elif found.own and found.target.endswith(TRITON_SUFFIX):
            findings.append(f"{found.where}: imports {found.target} outside a function")
    return findings


def collective_findings(tree: Tree) -> list[str]:
    """Communication outside of the two places that may communicate."""
    findings = []
    for module, source in tree.sources.items():
        if _covered(module, COLLECTIVES_ALLOWED):
            continue
        known = aliases(source)
        for node in ast.walk(source):
            name = None
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{entry.name}" for entry in node.names]
                name = next((entry for entry in names if _is_collective(entry)), None)
            elif isinstance(node, ast.Import):
                names = [entry.name for entry in node.names]
                name = next((entry for entry in names if _is_collective(entry)), None)
            elif isinstance(node, ast.Attribute):
                full = dotted(node, known)
                if full and _is_collective(full):
                    name = full
                elif node.attr in COLLECTIVE_METHODS:
                    name = f".{node.attr}"
            if name:
                findings.append(f"{tree.where(module, node)}: {name} communicates")
    return findings


def _is_collective(name: str) -> bool:
    if _covered(name, COMMUNICATION_MODULES):
        return True
    inside = name.startswith("torch.distributed.")
    return inside and name.rsplit(".", 1)[1] in COLLECTIVES | {"*"}


def _covered(name: str, allowed: frozenset[str] | tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)
