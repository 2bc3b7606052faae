"""Write docs/reference/ from the docstrings of the public names. Needs the standard library alone.

``python tools/reference_pages.py`` writes the pages, ``--check`` says which of them are stale.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("torch-ext/optimizer")
FOLDER = Path("docs/reference")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Sources?):(.*)$")
ENTRY = re.compile(r"^(\**[\w., *]+?)(?: \([^)]*\))?: (.*)$")
# Of a step's optimizer, what a training script calls; the rest serves the package itself.
OPTIMIZER_METHODS = ("step", "add_param_group", "state_dict", "load_state_dict", "report")
OPTIMIZER_METHODS += ("comm_report", "measure_steps", "turn_on_cpu_offload", "turn_off_cpu_offload")


@dataclass(frozen=True)
class Page:
    """One page.

    Args:
        title: Its heading.
        module: Of the names, below the package: "" is `opt` itself.
        names: In this order.
        methods: Of these classes alone, inherited ones too; None for a class's own.
    """

    title: str
    module: str
    names: tuple[str, ...]
    methods: tuple[str, ...] | None = None

    def call(self, name: str) -> str:
        """How a user writes the name."""
        return ".".join(part for part in ("opt", self.module.replace("/", "."), name) if part)


def page(title: str, module: str, names: str, methods: tuple[str, ...] | None = None) -> Page:
    """A `Page`; `names` as words."""
    return Page(title, module, tuple(names.split()), methods)


# stem of the file -> its page
PAGES = {
    "muon": page("Muon", "", "Muon MuonFactory", methods=()),
    "muon-adamw": page("MuonAdamW", "", "MuonAdamW DistMuonAdamW", methods=()),
    "methods": page(
        "Methods of the optimizers", "optimizers/step", "MuonBase", methods=OPTIMIZER_METHODS
    ),
    "groups": page(
        "Groups and ranks",
        "",
        "get_default_muon_param_groups default_is_muon DistributedConfig CommUnavailable "
        "all_gather_lc reduce_scatter_lc",
    ),
    "orthogonalize": page(
        "Orthogonalization",
        "",
        "orthogonalize newton_schulz polar_express gram_newton_schulz "
        "polar_express_coefficients COEFFICIENT_SETS",
    ),
    "checkpoints": page(
        "Checkpoints", "", "save_optimizer save_optimizer_async load_optimizer convert_state_dict"
    ),
    "tools": page("Looking inside", "", "explain profile_steps ProfileCallback"),
    "experts": page(
        "Layers of experts", "moe", "Experts experts_forward ExpertsLayout ExpertsLora"
    ),
    "blocks": page("Blocks of experts", "moe", "MoEBlock SharedExperts"),
    "routers": page("Routers", "moe", "Router RouterRule select_experts softmax_top_k group_top_k"),
    "experts-ops": page(
        "Operations of experts",
        "moe",
        "expert_sort ExpertOrder grouped_lora_linear LoraFactors glu parallel_linear_lora",
    ),
    "experts-lora": page("LoRA on experts", "moe", "ExpertAdapters"),
    "lora-factors": page(
        "Factors of LoRA", "moe", "LoraProjection factor_views selective_lora_weights"
    ),
    "quantized-experts": page("Packed experts", "moe", "QuantizedExperts"),
    "quantized-weights": page(
        "Packed weights",
        "moe",
        "QuantizedWeight expert_weight active_experts ActiveExperts selective_expert_weights",
    ),
    "expert-offload": page(
        "Packed experts in host memory, and how they are multiplied",
        "moe",
        "ExpertOffload choose_strategy explain_quantized",
    ),
    "packed-formats": page(
        "NF4, MXFP4 and FP8",
        "",
        "nf4_quantize nf4_dequant mxfp4_quantize mxfp4_dequant fp8_quantize fp8_dequant",
    ),
    "tensor-parallel": page(
        "Tensor parallelism",
        "tensor_parallel",
        "all_gather_matmul matmul_reduce_scatter sharded_newton_schulz assert_async_tp_fused "
        "comm_report CommRecord reset_comm_report PipelinedAllGatherMatmul",
    ),
    "tensor-parallel-float8": page(
        "Tensor parallelism, operands in float8",
        "tensor_parallel",
        "all_gather_scaled_matmul scaled_matmul_reduce_scatter scaled_matmul",
    ),
    "layers": page("Hub layers", "layers", "ScatterMoEExperts"),
    "lora": page(
        "LoRA on models",
        "integrations",
        "use_in_transformers attach_lora merge_lora unmerge_lora detach_lora",
    ),
    "adapters": page(
        "Adapters",
        "integrations",
        "set_lora enable_lora disable_lora lora_disabled save_peft_adapter load_peft_adapter",
    ),
    "quantized-models": page("Models in 4 bits", "integrations", "load_quantized quantize_experts"),
}


class Sources:
    """The package's files as trees, and where its names are defined."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._trees: dict[Path, ast.Module] = {}

    def tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text())
        return self._trees[path]

    def file(self, module: Path) -> Path:
        """The file of a module, named without a suffix."""
        path = module / "__init__.py"
        return path if path.is_file() else module.with_suffix(".py")

    def find(self, name: str, path: Path) -> tuple[ast.stmt | None, Path]:
        """The definition of a name of a file, through imports, and its file; None for a module.

        Raises:
            LookupError: The file neither defines nor imports it.
        """
        for node in self.tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node, path
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return node, path
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                for alias in node.names:
                    if (alias.asname or alias.name) != name:
                        continue
                    if node.module is None:
                        return None, self.file(folder / alias.name)
                    module = folder.joinpath(*node.module.split("."))
                    return self.find(alias.name, self.file(module))
        raise LookupError(f"{path}: no {name}")

    def method(
        self, name: str, node: ast.ClassDef, path: Path
    ) -> tuple[ast.FunctionDef, Path] | None:
        """A method of a class or of the package's classes that it derives from, and its file."""
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == name:
                return inner, path
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    found, place = self.find(base.id, path)
                except LookupError:  # of torch
                    continue
                if isinstance(found, ast.ClassDef) and (inner := self.method(name, found, place)):
                    return inner
        return None


def signature(call: str, node: ast.FunctionDef, path: Path) -> str:
    """The definition as its author wrote it, comments with shapes included, without `self`."""
    lines = path.read_text().splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    text = textwrap.dedent("\n".join(lines))
    text = re.sub(r"\s*# noqa[^\n]*", "", text)
    text = re.sub(r"^def \w+\(", f"{call}(", text)
    text = re.sub(r"\((\s*)self(?:, |,\s*\n\s*|(?=\)))", r"(\1", text, count=1)
    return re.sub(r"( -> None)?:\s*$", "", text.rstrip())


def fields(call: str, node: ast.ClassDef) -> str:
    """A dataclass as the call that makes it."""
    found = [f"    {ast.unparse(item)}," for item in node.body if isinstance(item, ast.AnnAssign)]
    return "\n".join([f"{call}(", *found, ")"]) if found else f"{call}()"


def prose(docstring: str) -> Iterator[str]:
    """A docstring of Google's form as lines of Markdown."""
    lines = inspect.cleandoc(docstring).replace("``", "`").splitlines()
    starts = [i for i, line in enumerate(lines) if SECTION.match(line)]
    yield from paragraphs(lines[: starts[0]] if starts else lines)
    for start, end in itertools.pairwise([*starts, len(lines)]):
        name, rest = SECTION.match(lines[start]).groups()
        body = list(itertools.takewhile(lambda line: line[:1] in ("", " "), lines[start + 1 : end]))
        after = lines[start + 1 + len(body) : end]
        said = " ".join([rest.strip(), *map(str.strip, body)]).strip()
        if name.startswith("Source"):
            yield from ["", f"{name}: {said}"]
        elif name in ("Returns", "Yields"):
            yield from ["", f"**{name}** {said}"]
        else:
            indented = textwrap.dedent("\n".join(body)).splitlines()
            yield from ["", f"**{name}**", "", *entries(indented)]
        if after:
            yield from ["", *paragraphs(after)]


def paragraphs(lines: list[str]) -> Iterator[str]:
    """Text as it is; what is indented, such as a formula, as a block."""
    block = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not block:
            yield "```"
        if block and not indented:
            yield "```"
        block = indented
        yield line[4:] if indented else line
    if block:
        yield "```"


def entries(lines: list[str]) -> Iterator[str]:
    """`name: text` and its continuations, each as an item of a list on one line."""
    item = ""
    for line in lines:
        if line and not line.startswith(" ") and (match := ENTRY.match(line)):
            if item:
                yield item
            names = ", ".join(f"`{name.strip()}`" for name in match[1].split(","))
            item = f"- {names}: {match[2]}"
        elif line.strip():
            item = f"{item} {line.strip()}" if item else line.strip()
    if item:
        yield item


def described(page: Page, name: str, sources: Sources) -> Iterator[str]:
    """What a page says of a name."""
    start = sources.file(sources.package / page.module) if page.module else None
    node, path = sources.find(name, start or sources.package / "__init__.py")
    call = page.call(name)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield from [f"## {name}", "", f"`{call}`: {comment_above(node, path)}"]
        return
    if name != "MuonBase":
        yield from [f"## {name}", "", "```"]
        if isinstance(node, ast.ClassDef):
            make = sources.method("__init__", node, path)
            yield signature(call, *make) if make else fields(call, node)
        else:
            yield signature(call, node, path)
        yield from ["```", "", *prose(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        yield from methods(page, node, path, sources)


def methods(page: Page, node: ast.ClassDef, path: Path, sources: Sources) -> Iterator[str]:
    own = [
        inner.name
        for inner in node.body
        if isinstance(inner, ast.FunctionDef)
        and not inner.name.startswith("_")
        and not inner.decorator_list
        and ast.get_docstring(inner)
    ]
    for name in own if page.methods is None else page.methods:
        method, place = sources.method(name, node, path)
        yield from ["", f"### {name}" if page.methods is None else f"## {name}", "", "```"]
        yield signature(f".{name}", method, place)
        yield from ["```", "", *prose(ast.get_docstring(method) or "")]


def comment_above(node: ast.stmt, path: Path) -> str:
    """The comment right above a constant."""
    found: list[str] = []
    for line in reversed(path.read_text().splitlines()[: node.lineno - 1]):
        if not line.startswith("#"):
            break
        found.insert(0, line.lstrip("# "))
    return " ".join(found)


def render(page: Page, sources: Sources) -> str:
    head = [
        f"# {page.title}",
        "",
        "`opt` is what `get_kernel` returns. `make reference` writes this from the docstrings.",
    ]
    for name in page.names:
        head += ["", *described(page, name, sources)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(head)).rstrip() + "\n"


def index() -> str:
    lines = [
        "# Reference",
        "",
        "Every public name, by page. `opt` is what `get_kernel` returns.",
        "",
    ]
    lines += ["| page | names |", "|---|---|"]
    for stem, page in PAGES.items():
        names = page.names if page.module != "optimizers/step" else page.methods
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| [{page.title}]({stem}.md) | {shown} |")
    return "\n".join(lines) + "\n"


def rendered(root: Path) -> dict[Path, str]:
    """Path of every page below `root` -> its text."""
    sources = Sources(root / PACKAGE)
    texts = {FOLDER / f"{stem}.md": render(page, sources) for stem, page in PAGES.items()}
    return {FOLDER / "README.md": index(), **texts}


def stale(root: Path) -> list[Path]:
    """Pages that are not what the docstrings say, and files that no page is."""
    wanted = rendered(root)
    found = [path for path, text in wanted.items() if not _has(root / path, text)]
    return found + [
        FOLDER / path.name
        for path in sorted((root / FOLDER).glob("*"))
        if FOLDER / path.name not in wanted
    ]


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    if parser.parse_args(arguments).check:
        found = stale(ROOT)
        for path in found:
            print(f"{path}: is stale; run `make reference`", file=sys.stderr)
        return min(len(found), 1)
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    for path, text in rendered(ROOT).items():
        (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
