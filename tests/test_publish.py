"""tools/publish.py: what it would send, what it refuses, and the calls it makes."""

import inspect
import json
import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernels.benchmark import Benchmark

from ._checkout import ROOT, git, metadata_of, run_build, tool, variant_of
from ._project import write_files


def plan_of(root: Path, allow_local_build: bool = True):
    project = tool("local_build.project").load_project(root)
    return tool("publish").make_plan(project, allow_local_build)


def refusal(root: Path, allow_local_build: bool = True) -> str:
    with pytest.raises(tool("local_build").BuildError) as caught:
        plan_of(root, allow_local_build)
    return str(caught.value)


def edit_metadata(root: Path, folder: Path | None = None, **changes) -> None:
    path = (folder or variant_of(root)) / "metadata.json"
    path.write_text(json.dumps(metadata_of(path.parent) | changes))


def commit(root: Path) -> None:
    """Commit everything; the variant counts as built from that."""
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "more")
    provenance = metadata_of(variant_of(root))["provenance"]
    provenance["kernel"]["commit"] = git(root, "rev-parse", "HEAD")
    edit_metadata(root, provenance=provenance)


class FakeHub:
    """Records calls; every one must fit the signature of the real `HfApi` method."""

    def __init__(self, branches: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> None:
        self.branches, self.files, self.calls = branches, files, []

    def __getattr__(self, name: str):
        from huggingface_hub import HfApi

        signature = inspect.signature(getattr(HfApi, name))

        def call(**arguments):
            signature.bind(self, **arguments)
            self.calls.append((name, arguments))
            if name == "list_repo_refs":
                return SimpleNamespace(branches=[SimpleNamespace(name=b) for b in self.branches])
            return list(self.files) if name == "list_repo_files" else None

        return call

    def commits(self) -> dict[str, list]:
        """Branch -> operations."""
        return {a["revision"]: a["operations"] for n, a in self.calls if n == "create_commit"}


def test_plan_lists_the_variant_and_the_card(checkout: Path, repo_id: str):
    write_files(checkout / "benchmarks", {"benchmark_nf4_dequant.py": "", "run.py": ""})
    commit(checkout)
    variant = variant_of(checkout)
    plan = plan_of(checkout)
    assert (plan.repo_id, plan.branch) == (repo_id, "v1")
    shipped = {p for p in variant.rglob("*") if p.is_file()}
    expected = {f"build/{variant.name}/{p.relative_to(variant)}" for p in shipped}
    expected.add("benchmarks/benchmark_nf4_dequant.py")
    assert {file.path for file in plan.files} == expected
    assert plan.card.path == "README.md" and plan.unsigned == (variant.name,)
    digests = metadata_of(variant)["digest"]["files"]
    sent = {file.path: file.digest for file in plan.files}
    assert {p: d for p, d in sent.items() if d} == {
        f"build/{variant.name}/{name}": digest for name, digest in digests.items()
    }
    assert {p for p, d in sent.items() if not d} == {
        f"build/{variant.name}/metadata.json",
        "benchmarks/benchmark_nf4_dequant.py",
    }
    (library,) = (file for file in plan.files if file.path.endswith(".so"))
    assert library.size == next(variant.glob("*.so")).stat().st_size
    name = tool("publish").SIGNATURE
    (variant / name).write_text("{}")
    signed = plan_of(checkout)
    assert signed.unsigned == ()
    assert any(file.path.endswith(f"/{name}") for file in signed.files)


def test_local_builds_need_the_flag(checkout: Path):
    assert "--allow-local-build" in refusal(checkout, allow_local_build=False)
    provenance = metadata_of(variant_of(checkout))["provenance"]
    edit_metadata(checkout, provenance=provenance | {"kernel-builder": {"version": "0.17.0"}})
    assert plan_of(checkout, allow_local_build=False).files


def test_a_dirty_build_is_refused(checkout: Path):
    package = checkout / "torch-ext" / "optimizer" / "__init__.py"
    package.write_text(package.read_text() + "# changed\n")
    assert run_build(checkout, "--backend", "cpu").returncode == 0
    assert "dirty tree" in refusal(checkout)


def test_what_a_variant_must_be(checkout: Path):
    """Changed one after the other: each fault is said beside those before it, or instead."""
    variant, benchmarks = variant_of(checkout), checkout / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "benchmark_linked.py").symlink_to("/etc/hostname")
    commit(checkout)
    assert "benchmark_linked.py is a symbolic link" in refusal(checkout)
    shutil.rmtree(benchmarks)
    commit(checkout)
    (variant / "__init__.py").write_text("")
    (variant / "added.py").write_text("")
    message = refusal(checkout)
    assert "digest" in message and "__init__.py" in message and "added.py" in message
    edit_metadata(checkout, version=2)
    assert "is optimizer version 2, but build.toml says optimizer version 1" in refusal(checkout)
    edit_metadata(checkout, provenance={"kernel-builder": {"version": "0.17.0"}})
    assert "provenance names no commit" in refusal(checkout)
    shutil.rmtree(variant)
    assert "no variant in" in refusal(checkout)


def test_a_cuda_variant_brings_machine_code(checkout: Path):
    """Whole, and of its own sources: an archive of others is as good as none."""
    variant = variant_of(checkout)
    archive = variant / tool("publish").PREBUILT
    missing = "brings no prebuilt_sm90.zip, so first calls compile: make prebuilt"
    stale = "prebuilt_sm90.zip was made for other Python files or for a part of the layers"
    archive.touch()
    assert missing not in refusal(checkout), "those of other backends need none"
    edit_metadata(checkout, backend={"type": "cuda", "archs": ["9.0a"]})
    assert missing in refusal(checkout)
    made = b"PK\5\6" + bytes(18)  # without entries
    for complete, complaints in ((False, [stale]), (True, [])):
        tool("prebuild").put(made, variant, complete=complete)
        assert [words for words in (missing, stale) if words in refusal(checkout)] == complaints
    source = variant / "reference" / "nf4.py"
    source.write_text(source.read_text() + "# another\n")
    assert stale in refusal(checkout)


def test_a_variant_of_another_commit_is_refused(checkout: Path):
    """Also where only one of two variants is."""
    variant = variant_of(checkout)
    built_from = git(checkout, "rev-parse", "HEAD")
    old = shutil.copytree(variant, variant.with_name("torch-stable-abi211-cpu-aarch64-linux"))
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "next")
    head = git(checkout, "rev-parse", "HEAD")
    expected = f"was built from commit {built_from}, but the checkout is at {head}"
    assert refusal(checkout).count(expected) == 2
    commit_of_one = metadata_of(variant)["provenance"]
    commit_of_one["kernel"]["commit"] = head
    edit_metadata(checkout, provenance=commit_of_one, folder=variant)
    message = refusal(checkout)
    assert message.count(expected) == 1 and f"{old.name}: was built from" in message


@pytest.mark.parametrize("name", ("CARD.md", "benchmarks/benchmark_new.py"))
def test_a_checkout_that_differs_from_its_commit_is_refused(checkout: Path, name: str):
    """The card and the benchmarks come from it, tracked or not."""
    (checkout / name).parent.mkdir(exist_ok=True)
    with (checkout / name).open("a") as file:
        file.write("changed\n")
    assert f"differs from its commit in {name}" in refusal(checkout)


OTHER_BACKEND = ("names the backend cuda, but metadata.json says cpu",)


@pytest.mark.parametrize(
    ("name", "complaints"),
    [
        ("torch-stable-abi211-cu130-aarch64-linux", ("is not for aarch64", *OTHER_BACKEND)),
        ("torch-cpu", ("names a variant without compiled code",)),
        ("torch-stable-abi211-cpu", ("Invalid arch variant parts",)),
    ],
)
def test_a_folder_with_another_variant_is_refused(checkout: Path, name: str, complaints):
    """Clients choose by the name of the folder."""
    variant = variant_of(checkout)
    shutil.copytree(variant, variant.with_name(name))
    message = refusal(checkout)
    assert all(complaint in message for complaint in complaints)
    assert f"{variant.name}:" not in message


LINKED = "is a symbolic link"


@pytest.mark.parametrize(
    ("name", "target", "complaint"),  # target None: a file; "itself": moved, then linked to
    [
        ("__pycache__/secret.txt", None, "__pycache__ holds bytecode, which has no digest: build"),
        ("kernels/__pycache__/x.cpython-311.pyc", None, "kernels/__pycache__ holds bytecode"),
        ("loose.pyc", None, "loose.pyc has no digest in metadata.json: remove it or build again"),
        ("kernels/linked.py", "/etc/hostname", f"kernels/linked.py {LINKED}"),
        ("layers.py", "itself", f"layers.py {LINKED}"),  # the content is as the digest says
        ("linked", "/etc", f"linked {LINKED}"),
        (".", "itself", f". {LINKED}: copy what it points to (`cp -rL`)"),
    ],
)
def test_what_no_digest_vouches_for_is_refused(checkout: Path, name, target, complaint):
    """The digests leave out bytecode and follow links; what is sent must not."""
    variant = variant_of(checkout)
    changed = variant / name
    if target is None:
        write_files(variant, {name: ""})
    else:
        target = changed.rename(checkout / "elsewhere") if target == "itself" else Path(target)
        changed.symlink_to(target, target_is_directory=target.is_dir())
    assert f"{variant.name}: {complaint}" in refusal(checkout)


def test_upload_to_a_new_branch(checkout: Path, repo_id: str):
    plan, hub = plan_of(checkout), FakeHub(("main",), ("README.md", "build/torch-cpu/old.py"))
    tool("publish").upload(plan, hub)
    assert [name for name, _ in hub.calls] == [
        *("create_repo", "list_repo_refs", "create_branch", "list_repo_files"),
        *("create_commit", "create_commit"),
    ]
    assert all(a["repo_id"] == repo_id and a["repo_type"] == "kernel" for _, a in hub.calls)
    version, main = hub.commits()["v1"], hub.commits()["main"]
    # the new branch is a copy of main, so what lies below build/ there goes
    assert [o.path_in_repo for o in version if "Delete" in type(o).__name__] == [
        "build/torch-cpu/old.py"
    ]
    added = {o.path_in_repo for o in version if "Add" in type(o).__name__}
    assert added == {file.path for file in plan.files}
    assert [o.path_in_repo for o in main] == ["README.md"]


def test_upload_replaces_its_variants_and_keeps_others(checkout: Path):
    plan = plan_of(checkout)
    mine, other = f"build/{plan.variants[0]}/gone.py", "build/torch-cpu/kept.py"
    hub = FakeHub(("main", "v1"), (mine, other, plan.files[0].path, "benchmarks/benchmark_old.py"))
    tool("publish").upload(plan, hub)
    deleted = [o.path_in_repo for o in hub.commits()["v1"] if "Delete" in type(o).__name__]
    assert deleted == [mine, "benchmarks/benchmark_old.py"]
    assert "create_branch" not in [name for name, _ in hub.calls]


def test_dry_run_prints_and_sends_nothing(checkout: Path, capsys, monkeypatch):
    publish = tool("publish")
    monkeypatch.setattr(publish, "upload", lambda *_: pytest.fail("a dry run must not upload"))
    arguments = ["--dry-run", "--root", str(checkout)]
    assert publish.main(arguments) == 1
    assert "--allow-local-build" in capsys.readouterr().err
    assert publish.main([*arguments, "--allow-local-build"]) == 0
    output = capsys.readouterr().out
    files = metadata_of(variant_of(checkout))["digest"]["files"]
    assert len(re.findall(r"^ *[\d,]+  verified ", output, re.M)) == len(files)
    assert "dry run: nothing was sent" in output


def test_card_is_filled(checkout: Path, repo_id: str):
    import yaml

    card = tool("hub_card")
    project = tool("local_build.project").load_project(checkout)
    text = card.render_card(project)
    assert "{{" not in text and "{%" not in text
    _, front_matter, body = text.split("---\n", 2)
    assert yaml.safe_load(front_matter) == {
        "library_name": "kernels",
        "license": "apache-2.0",
        "tags": ["kernel"],
    }
    assert f'get_kernel("{repo_id}", version=1, trust_remote_code=True)' in body
    names = set(card.read_all(project.package_dir / "__init__.py"))
    for name in (names - {"layers"}) | {"ScatterMoEExperts"}:  # layers are listed one by one
        assert f"- `{name}`" in body


def test_card_links_to_the_source_and_names_no_path_that_the_hub_lacks():
    project = tool("local_build.project").load_project(ROOT)
    text = tool("hub_card").render_card(project)
    assert not re.search(r"`(?:kernels-src|torch-ext|tests|tools|docs)/", text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) >= 10
    for target in targets:
        path = re.sub(rf"^{re.escape(project.source)}(/(blob|tree|raw)/main/|$)", "", target)
        assert path != target or target == project.source, f"{target} leads nowhere on the Hub"
        assert (ROOT / path).exists(), target


def test_card_mistakes_are_errors(checkout: Path):
    card, error = tool("hub_card"), tool("local_build").BuildError
    project = tool("local_build.project").load_project(checkout)
    (checkout / "CARD.md").write_text("{{ repo_name }}")
    with pytest.raises(error, match="repo_name"):
        card.render_card(project)
    (project.package_dir / "__init__.py").write_text("__all__ = sorted(globals())\n")
    with pytest.raises(error, match="must be a literal list"):
        card.render_card(project)


SMALL = {"Nf4DequantBenchmark": (3, 8, 16, 2), "PolarExpressBenchmark": (2, 24, 40)}


@pytest.fixture(scope="module")
def classes() -> dict[str, type]:
    spec = spec_from_file_location("hub_benchmark", ROOT / "benchmarks/benchmark.py")
    module: ModuleType = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: found
        for name, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, Benchmark) and found is not Benchmark
    }


def test_every_workload_has_its_three_parts(classes) -> None:
    assert set(classes) == set(SMALL)
    for found in classes.values():
        workloads = [name for name in dir(found) if name.startswith("benchmark_")]
        assert workloads and isinstance(found.seed, int)
        for name in workloads:
            for part in ("setup", "verify"):
                assert callable(getattr(found, name.replace("benchmark", part, 1)))


@pytest.mark.parametrize("name", SMALL)
def test_results_are_those_of_plain_pytorch(classes, opt, device, name: str) -> None:
    torch.manual_seed(0)
    benchmark = classes[name]()
    benchmark.kernel, benchmark.device = opt, str(device)
    benchmark._setup(*SMALL[name])
    benchmark._run()
    expected = benchmark._verify()
    assert expected.dtype == benchmark.out.dtype and expected.abs().max() > 0.1
    torch.testing.assert_close(benchmark.out, expected, atol=2e-3, rtol=0)
