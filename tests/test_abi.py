"""The binary rules: every artifact in build/ keeps them, and each check can fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ._checkout import ROOT, tool


def artifacts() -> list[Path]:
    return sorted((ROOT / "build").glob("torch*/*.abi3.so"))


@pytest.mark.artifacts
def test_every_artifact_passes_every_check():
    audit, torch = tool("local_build.audit"), tool("local_build.toolchain").find_torch()
    libraries = artifacts()
    assert libraries, "no variant in build/: run `make build`"
    for library in libraries:
        audit.audit_library(library, ROOT, torch)  # what cannot be published runs here all the same


@pytest.mark.artifacts
def test_artifacts_embed_no_path_of_this_torch():
    """`__FILE__` in torch's headers would carry the folder of whoever built into every message."""
    folder = str(tool("local_build.toolchain").find_torch().include).encode()
    assert all(folder not in library.read_bytes() for library in artifacts())


def link(folder: Path, name: str, code: str, *flags: str) -> Path:
    """Compile C code to a shared library."""
    source, library = folder / f"{name}.c", folder / name
    source.write_text(code)
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-o", str(library), str(source), *flags]
    subprocess.run(command, check=True, capture_output=True)
    return library


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A library that breaks every rule at once."""
    versions = tmp_path / "versions.map"
    versions.write_text("GLIBCXX_3.4.99 { global: too_new; };\n")
    stub_flags = (f"-Wl,--version-script={versions}", "-Wl,-soname,libstdc++.so.6")
    link(tmp_path, "libtoonew.so", "void too_new(void) {}\n", *stub_flags)
    link(tmp_path, "libforeign.so", "void foreign(void) {}\n", "-Wl,-soname,libforeign.so")
    code = """
        void too_new(void); void foreign(void);
        void aoti_torch_invented(void); void forgotten_source(void);
        void _ZN2at5emptyEv(void); void PyUnicode_AsUTF8AndSize(void);
        void all(void) {
          too_new(); foreign(); aoti_torch_invented(); forgotten_source();
          _ZN2at5emptyEv(); PyUnicode_AsUTF8AndSize();
        }
    """
    flags = (f"-L{tmp_path}", "-ltoonew", "-lforeign", "-Wl,-rpath,/somewhere")
    return link(tmp_path, "planted.abi3.so", code, *flags)


def test_each_check_can_fail(planted: Path):
    audit, errors = tool("local_build.audit"), tool("local_build.errors")
    assert audit.check_manylinux(planted) == ["manylinux_2_28: too_new@GLIBCXX_3.4.99"]
    with pytest.raises(errors.BuildError) as caught:
        audit.audit_library(planted, ROOT, tool("local_build.toolchain").find_torch())
    message = str(caught.value)
    for finding in (
        "PyUnicode_AsUTF8AndSize",  # part of abi3 since 3.10, one version too new
        "torch-abi-audit",
        "RPATH or RUNPATH '/somewhere'",
        "NEEDED libforeign.so",
        "NEEDED lacks libtorch.so",
        "aoti_torch_invented is not declared by torch 2.11",
        "forgotten_source is undefined and no library provides it",
    ):
        assert finding in message, f"{finding!r} is missing from:\n{message}"


def test_a_clean_library_has_no_dynamic_findings(tmp_path: Path):
    audit = tool("local_build.audit")
    link(tmp_path, "libtorch.so", "void torch_delete_list(void) {}\n", "-Wl,-soname,libtorch.so")
    code = "void torch_delete_list(void); void call(void) { torch_delete_list(); }\n"
    dynamic = audit.read_dynamic(link(tmp_path, "good.so", code, f"-L{tmp_path}", "-ltorch"))
    assert dynamic.needed == ("libtorch.so",) and set(dynamic.undefined) == {"torch_delete_list"}
    assert audit.check_dynamic(dynamic) == []
    known = {"2.11": frozenset({"torch_delete_list"})}
    assert audit.check_undefined(dynamic.undefined, known) == []


def test_declarations_are_found_in_torch_headers(tmp_path: Path):
    symbols = tool("local_build.shim_symbols")
    folder = tmp_path / "torch" / "csrc" / "stable" / "c"
    folder.mkdir(parents=True)
    (folder / "shim.h").write_text(
        "#define AOTI_TORCH_EXPORT\n"
        "AOTI_TORCH_EXPORT AOTITorchError\ntorch_on_two_lines(\n    int x);\n"
        "AOTI_TORCH_EXPORT const char* aoti_torch_pointer();\n"
        "// torch_in_a_comment( and torch_not_exported(int);\n"
    )
    assert symbols.declared_symbols(tmp_path) == {"torch_on_two_lines", "aoti_torch_pointer"}


def test_the_committed_list_is_of_torch_2_11():
    audit, symbols = tool("local_build.audit"), tool("local_build.shim_symbols")
    path = ROOT / audit.SYMBOL_LIST
    assert path.read_text().startswith("# torch 2.11.0")
    listed = symbols.read_symbol_list(path)
    assert {"torch_call_dispatcher", "aoti_torch_get_current_cuda_stream"} <= listed
    # nothing that came later: torch 2.13 added random number generators to the stable ABI
    assert not any("generator_" in name for name in listed if name.startswith("torch_"))
