"""What the workflows run and what a release is made with: all of it pinned, rights kept apart."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ._project import ROOT

pytestmark = pytest.mark.static

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMMIT = re.compile(r"[0-9a-f]{40}")
DOWNLOAD = re.compile(r"\b(?:curl|wget) -")
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def unpinned(text: str) -> list[str]:
    """Lines of a workflow that run something which may be another thing tomorrow."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        line = line.strip()
        if action := re.match(r"(?:- )?uses: (\S+)(?: # v[\d.]+)?$", line):
            name, _, at = action[1].partition("@")
            fine = name.startswith("./") or COMMIT.fullmatch(at)
        elif line.startswith("#"):
            fine = True
        elif re.search(r"\bpip3? install\b", line):
            fine = "--require-hashes" in line and "--only-binary :all:" in line
        elif re.search(r"\bnix (build|eval|run|develop|shell)\b", line):
            fine = "--no-update-lock-file" in line and "github:" not in line
        elif DOWNLOAD.search(line):
            fine = joined.count("sha256sum --check --strict") >= len(DOWNLOAD.findall(joined))
        else:
            fine = not re.search(r"\bcargo install\b|\bnpx\b|\bnix-env\b", line)
        if not fine:
            found.append(line)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_pinned_code_only(path) -> None:
    assert unpinned(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "- uses: actions/download-artifact@v7",
        "- uses: cachix/cachix-action@main # v17",
        "run: nix run -L github:huggingface/kernels#kernel-builder -- upload",
        'nix build -L ".#backendBundle.cuda"',
        """pip install "$(grep '^kernels==' tools/requirements.txt)" jinja2""",
        "pip install \\\n  --require-hashes -r tools/requirements-release.txt",
        "curl -fsSLO https://developer.download.nvidia.com/cuda-keyring_1.1-1_all.deb",
        "cargo install --git https://github.com/huggingface/kernels hf-kernel-builder",
    ],
)
def test_what_is_not_pinned_is_seen(line) -> None:
    assert len(unpinned(line)) == 1


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """("file: job", job) of every workflow; what a workflow permits is what its jobs inherit."""
    import yaml

    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        for name, job in workflow["jobs"].items():
            yield f"{path.stem}: {name}", {"permissions": workflow["permissions"], **job}


def test_a_pull_request_that_changes_what_prebuilds_builds() -> None:
    text = (ROOT / ".github/workflows/build.yml").read_text()
    (listed,) = re.findall(r"pull_request:\n    paths:\n((?:      - .*\n)+)", text)
    imported = re.findall(r"^from (\w+)", (ROOT / "tools/prebuild.py").read_text(), re.M)
    ours = [name for name in imported if list((ROOT / "tools").glob(f"{name}*"))]
    assert {"compile_triton", "local_build"} <= set(ours)
    assert [name for name in (*ours, "prebuild") if f"tools/{name}" not in listed] == []


def test_rights_are_kept_apart() -> None:
    """One job signs, one step of another has the token, nobody writes to the repository."""
    rights, secrets = {}, {}
    for name, job in jobs():
        rights[name] = {right for right, level in job["permissions"].items() if level == "write"}
        steps = job.pop("steps", [])
        assert "secrets" not in str(job), name
        for step in steps:
            if "secrets." in str(step):
                secrets[name, step.get("name")] = step
    assert {name: found for name, found in rights.items() if found} == {
        "release: sign": {"id-token"}
    }
    (((job, _), step),) = secrets.items()
    assert job == "release: publish" and step["run"] == "python tools/publish.py"
    assert "environment" in dict(jobs())[job]


def test_what_is_signed_and_sent_is_not_built_beside_a_right() -> None:
    """Neither job installs a toolchain or a cache."""
    found = dict(jobs())
    for name in ("release: sign", "release: publish"):
        assert not re.search(r"nix|cachix|cargo|apt-get|make ", str(found[name]["steps"])), name


def test_the_builder_is_locked() -> None:
    (wanted,) = re.findall(
        r'kernel-builder\.url = "github:huggingface/kernels/([0-9a-f]{40})"',
        (ROOT / "flake.nix").read_text(),
    )
    lock = json.loads((ROOT / "flake.lock").read_text())
    nodes = {name: node for name, node in lock["nodes"].items() if name != lock["root"]}
    builder = nodes["kernel-builder"]
    assert builder["locked"]["rev"] == builder["original"]["rev"] == wanted
    assert lock["nodes"][lock["root"]]["inputs"] == {"kernel-builder": "kernel-builder"}
    for name, node in nodes.items():
        assert COMMIT.fullmatch(node["locked"]["rev"]), name
        assert re.fullmatch(r"sha256-[A-Za-z0-9+/]{43}=", node["locked"]["narHash"]), name


def requirements(name: str) -> dict[str, list[str]]:
    """Requirement -> its digests, of a file in tools/."""
    text = (ROOT / "tools" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.split()[0].replace("_", "-").lower(): DIGEST.findall(line) for line in lines}


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("requirements*")), ids=str)
def test_every_requirement_is_one_version(path) -> None:
    names = requirements(path.name)
    assert names
    assert [name for name in names if not re.fullmatch(r"[\w.-]+==[\w.]+", name)] == []


@pytest.mark.parametrize("kind", ["release", "prebuild"])
def test_what_is_sent_is_made_by_digest(kind) -> None:
    """With the versions of the other tools, but for the Triton whose code was measured."""
    locked, wanted = (requirements(f"requirements-{kind}.{end}") for end in ("txt", "in"))
    assert [name for name, digests in locked.items() if not digests] == []
    assert set(wanted) <= set(locked)
    measured = re.findall(r'^TRITON = "(.+)"', (ROOT / "tools" / "prebuild.py").read_text(), re.M)
    others = {f"triton=={number}" for number in measured if kind == "prebuild"}
    assert set(wanted) - set(requirements("requirements.txt")) == others
