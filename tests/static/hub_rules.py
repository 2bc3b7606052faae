"""The Hub's rules for the Python half of a kernel package, read off the source."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .project import aliases, dotted, executed_at_import, parse, place, read_text

REGISTRATIONS = frozenset(
    {
        "custom_op",
        "triton_op",
        "register_autograd",
        "register_autocast",
        "register_fake",
        "register_kernel",
        "register_torch_dispatch",
        "register_vmap",
    }
)
PREFIX = "add_op_namespace_prefix"

# kernel-builder writes these; committed copies collide with it.
GENERATED = re.compile(
    r"setup\.py|pyproject\.toml|CMakeLists\.txt|cmake/.*|build/.*|metadata-[^/]*\.json"
    r"|torch-ext/registration\.h|torch-ext/[^/]*/_ops\.py"
)

LAYER_ATTRIBUTES = frozenset({"has_backward", "can_torch_compile"})

# Calls that ask for a device or a driver. At import they fail in a builder without one.
DEVICE_QUERIES = ("torch.cuda.", "torch.accelerator.", "torch.xpu.", "triton.runtime.")


def _files(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, parse(path)


def facade_findings(package: Path) -> list[str]:
    """__init__.py: literal `__all__`, of what its imports bind, and `__version__`; no more."""
    path = package / "__init__.py"
    if not path.is_file():
        return [f"{package.name}/__init__.py is missing"]
    bound: set[str] = set()
    names: list[str] | None = None
    findings = []
    for node in parse(path).body:
        where = place(path, package, node.lineno)
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(entry.asname or entry.name).split(".")[0] for entry in node.names}
        elif isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            names = _literal_names(node.value)
            if names is None:
                findings.append(f"{where}: __all__ must be a literal list of strings")
        elif isinstance(node, ast.Assign) and _targets(node) == ["__version__"]:
            if not isinstance(node.value, ast.Constant):
                findings.append(f"{where}: __version__ must be a literal")
        elif not _is_docstring(node):
            findings.append(
                f"{where}: only imports, __all__, __version__ and the docstring belong here"
            )
    if names is None:
        return findings or ["__init__.py: there is no literal __all__"]
    for name in sorted({name for name in names if names.count(name) > 1}):
        findings.append(f"__init__.py: __all__ lists {name} more than once")
    for name in sorted(set(names) - bound):
        findings.append(f"__init__.py: __all__ lists {name}, which no import binds")
    for name in sorted(name for name in names if name.startswith("_")):
        findings.append(f"__init__.py: __all__ lists the private name {name}")
    if (package / "layers.py").is_file() and "layers" not in names:
        findings.append("__init__.py: layers.py exists, so __all__ must list layers")
    return findings


def public_names(package: Path) -> list[str]:
    """The literal `__all__` of the package; empty where there is none."""
    path = package / "__init__.py"
    if not path.is_file():
        return []
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            return _literal_names(node.value) or []
    return []


def nested_name_findings(package: Path) -> list[str]:
    """Nothing directly inside the package may carry the package's name."""
    return [
        f"{place(path, package)}: the layout check refuses this name inside {package.name}/"
        for path in sorted(package.glob("*"))
        if path.name.split(".")[0] == package.name
    ]


def op_prefix_findings(package: Path) -> list[str]:
    """Every registration names its op by a literal `add_op_namespace_prefix("...")`."""
    findings = []
    for path, tree in _files(package):
        known = aliases(tree)
        for node, decorates in _registrations(tree, known):
            where = place(path, package, node.lineno)
            verb = "decorator" if decorates else "call"
            if not isinstance(node, ast.Call) or not node.args or not _is_prefixed(node.args[0]):
                findings.append(f'{where}: the {verb} must begin with {PREFIX}("...")')
        findings += _prefix_import_findings(path, package, tree)
        findings += _signature_findings(path, package, tree)
    return findings


def defined_ops(package: Path) -> dict[str, Path]:
    """Ops that Python defines (`custom_op`, `triton_op`) and the file that does."""
    found = {}
    for path, tree in _files(package):
        known = aliases(tree)
        for node, _ in _registrations(tree, known):
            if not isinstance(node, ast.Call) or _last(node.func) not in ("custom_op", "triton_op"):
                continue
            if node.args and _is_prefixed(node.args[0]):
                found[node.args[0].args[0].value] = path
    return found


def _registrations(tree: ast.Module, known: dict[str, str]) -> Iterator[tuple[ast.expr, bool]]:
    """(node, is it a decorator) of every registration; a decorator may lack its call."""
    decorators = {
        decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        name = node.func if isinstance(node, ast.Call) else node
        if node in decorators:
            if _last(name) in REGISTRATIONS:
                yield node, True
        elif isinstance(node, ast.Call):
            full = dotted(name, known) or ""
            if full.startswith("torch.library.") and full.rsplit(".", 1)[1] in REGISTRATIONS:
                yield node, False


def _is_prefixed(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == PREFIX
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )


def _prefix_import_findings(path: Path, package: Path, tree: ast.Module) -> list[str]:
    """`_ops` is imported plainly: not under `try`, not renamed, not wrapped."""
    findings = []
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    guarded = {inner for node in tries for inner in ast.walk(node)}
    for node in ast.walk(tree):
        where = f"{place(path, package, getattr(node, 'lineno', 0))}"
        if isinstance(node, ast.ImportFrom) and node.level and (node.module or "") == "_ops":
            if node in guarded:
                findings.append(f"{where}: _ops is generated; import it without try")
            if any(entry.asname and entry.name == PREFIX for entry in node.names):
                findings.append(f"{where}: {PREFIX} must keep its name")
        elif isinstance(node, ast.FunctionDef) and node.name == PREFIX:
            findings.append(f"{where}: {PREFIX} comes from _ops; do not define it")
        elif isinstance(node, ast.Assign) and PREFIX in _targets(node):
            findings.append(f"{where}: {PREFIX} comes from _ops; do not bind it")
    return findings


def _signature_findings(path: Path, package: Path, tree: ast.Module) -> list[str]:
    """Lists in a signature under postponed annotations defeat torch's schema inference."""
    postponed = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(entry.name == "annotations" for entry in node.names)
        for node in tree.body
    )
    if not postponed:
        return []
    findings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            if _last(decorator.func) not in ("custom_op", "triton_op"):
                continue
            has_schema = any(keyword.arg == "schema" for keyword in decorator.keywords)
            arguments = node.args.args + node.args.kwonlyargs
            annotations = [entry.annotation for entry in arguments] + [node.returns]
            text = " ".join(ast.unparse(entry) for entry in annotations if entry)
            if not has_schema and re.search(r"\b([Ll]ist|Sequence)\[", text):
                where = place(path, package, node.lineno)
                findings.append(f"{where}: pass schema= to {node.name}, whose signature has lists")
    return findings


def generated_file_findings(committed: Iterable[Path]) -> list[str]:
    return [
        f"{path.as_posix()}: is generated by the build and must not be committed"
        for path in committed
        if GENERATED.fullmatch(path.as_posix())
    ]


def layer_findings(path: Path) -> list[str]:
    """layers.py: `nn.Module` classes with a `forward` and the two permitted attributes only."""
    findings = []
    for node in parse(path).body:
        where = f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ClassDef):
            if not any(_last(base) == "Module" for base in node.bases):
                findings.append(f"{where}: {node.name} must derive from nn.Module")
            findings += [f"{path.name}:{fault}" for fault in _layer_body_faults(node)]
        elif isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            continue
        elif not (isinstance(node, ast.Assign) and _targets(node) == ["__all__"]):
            findings.append(f"{where}: only layer classes and imports belong in {path.name}")
    return findings


def _layer_body_faults(layer: ast.ClassDef) -> Iterator[str]:
    methods = set()
    for node in layer.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            methods.add(node.name)
            if node.name != "forward":
                yield f"{node.lineno}: {layer.name}.{node.name}: forward is the only method allowed"
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue  # the type of a member that the replaced module has
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = _targets(node)
            if not set(targets) <= LAYER_ATTRIBUTES:
                names, allowed = ", ".join(targets), " and ".join(sorted(LAYER_ATTRIBUTES))
                yield f"{node.lineno}: {layer.name} sets {names}; allowed are {allowed}"
        elif not (_is_docstring(node) or isinstance(node, ast.Pass)):
            yield f"{node.lineno}: {layer.name} runs code in its class body"
    if "forward" not in methods:
        yield f"{layer.lineno}: {layer.name} has no forward"


def import_time_findings(package: Path) -> list[str]:
    """Device queries at import, and Triton autotuning anywhere.

    The choice of a configuration is a table: tuning at run time costs minutes and drifts between
    replicas.
    """
    findings = []
    for path, tree in _files(package):
        known = aliases(tree)
        for node in executed_at_import(tree):
            name = dotted(node.func, known) if isinstance(node, ast.Call) else None
            if name and name.startswith(DEVICE_QUERIES):
                where = place(path, package, node.lineno)
                findings.append(f"{where}: calls {name} while being imported")
        for node in ast.walk(tree):
            name = dotted(node.func, known) if isinstance(node, ast.Call) else None
            if name and name.rsplit(".", 1)[-1] == "autotune" and not _has_one_config(node):
                where = place(path, package, node.lineno)
                findings.append(
                    f"{where}: autotunes at run time; ship one configuration or a table"
                )
    return findings


def _has_one_config(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "configs"]
    configs = (given + call.args[:1] or [None])[0]
    return isinstance(configs, ast.List | ast.Tuple) and len(configs.elts) == 1


def benchmark_findings(folder: Path) -> list[str]:
    """Each benchmark*.py of the Hub's convention: a `Benchmark` subclass, and no sibling import."""
    paths = sorted(folder.glob("benchmark*.py"))
    if not paths:
        return [f"{folder.name}/: there is no benchmark*.py"]
    siblings = {path.stem for path in folder.glob("*") if path.suffix in ("", ".py")}
    siblings.add(folder.name)
    findings = []
    for path in paths:
        tree = parse(path)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        if not any(_last(base) == "Benchmark" for node in classes for base in node.bases):
            findings.append(f"{path.name}: defines no subclass of kernels.benchmark.Benchmark")
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [entry.name for entry in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            for name in names:
                if name.startswith(".") or name.split(".")[0] in siblings:
                    findings.append(f"{path.name}:{node.lineno}: imports its sibling {name}")
    return findings


def repo_id_findings(root: Path, files: Iterable[Path], repo_id: str) -> list[str]:
    """The Hub id is stated in build.toml alone; documents may show it, and then correctly.

    Records of runs (docs/benchmarks/*.json) hold the id that was loaded.
    """
    findings = []
    shown = re.compile(r"""(?:get_kernel\(\s*["']|LOCAL_KERNELS=["']?)([^"'=\s]+)""")
    for path in files:
        text = read_text(root / path)
        if text is None or path.as_posix() == "build.toml" or path.match("docs/benchmarks/*.json"):
            continue
        if path.suffix == ".md":
            others = [hit for hit in shown.finditer(text) if not _is_the_id(hit[1], repo_id)]
            message = f"does not show the id of build.toml, {repo_id}"
        else:
            others = list(re.finditer(re.escape(repo_id), text))
            message = f"repeats {repo_id}; read it from build.toml"
        for hit in others:
            line = text.count("\n", 0, hit.start()) + 1
            findings.append(f"{path.as_posix()}:{line}: {message}")
    return findings


def _is_the_id(shown: str, repo_id: str) -> bool:
    return shown == repo_id or shown.startswith(
        "{{"
    )  # the card's template is filled by the builder


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [ast.unparse(target) for target in targets]


def _literal_names(node: ast.expr) -> list[str] | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    good = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return value if good else None


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _last(node: ast.AST) -> str | None:
    """The last name of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
