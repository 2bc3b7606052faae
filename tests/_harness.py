"""The modules of benchmarks/harness as run.py imports them, and what a result file begins with."""

import importlib
from pathlib import Path
from types import ModuleType

from .static.project import ROOT, write_files
from .static.results import result_findings

BENCHMARKS = ROOT / "benchmarks"
COMMIT = "0123456789" * 4
HEAD = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": COMMIT,
    "sources": "ab" * 32,
    "ceilings": {"bf16_tflops": 770.0, "fp16_tflops": 760.0, "copy_tbps": 4.25},
}


class Harness:
    """`harness.nf4` is the module of that name, in whichever folder of the harness it lies."""

    def __getattr__(self, name: str) -> ModuleType:
        if name == "run":
            return importlib.import_module(name)
        (path,) = (BENCHMARKS / "harness").rglob(f"{name}.py")
        dotted = path.relative_to(BENCHMARKS).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(dotted)
        setattr(self, name, module)
        return module

    def copy_sources(self, entry: str, root: Path) -> None:
        for path in self.sources.source_files(entry):
            write_files(root, {path.relative_to(ROOT).as_posix(): path.read_text()})

    def is_well_formed(self, rows: list) -> bool:
        result = HEAD | {"rows": [self.report.entry(row) for row in rows]}
        return result_findings("e", result) == []
