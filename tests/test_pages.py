"""Pages name what exists: links, paths of docs/ in any file, and messages of errors. No torch."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ._checkout import tool
from ._project import PACKAGE, ROOT, assert_none, parse, project_files, read_text, write_files

pytestmark = pytest.mark.static

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A path of docs/ in a text, where no word or folder precedes it.
MENTION = re.compile(r"(?<![\w/.-])docs/[\w./-]+\.(?:md|json|txt)\b")
# A source file in backticks. A build makes GENERATED.
SOURCE = re.compile(r"`([\w/*.-]+\.(?:py|cu|cuh|cpp|h|toml|yml))`")
GENERATED = {"_ops.py", "pyproject.toml", "registration.h", "setup.py"}
COMMAND = re.compile(r"(?:^|`)((?:make|python3?|torchrun) [^`\n#|&]+)", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# CHANGELOG.md says what was; this file's and the manifest's own examples name no page.
NOT_TODAYS = {"CHANGELOG.md", "tests/test_pages.py", "tests/test_manifest.py"}
# What README and a page may have at most, so that somebody reads them.
README_LINES, PAGE_LINES = 180, 250
FOR_AUTHORS = re.compile(r"kernels-src|torch-ext|\bwgmma\b|\bTMA\b|mma\.sync|_sm90|\[test_\w+")
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
VALUE = "\0"  # in place of what a message fills in


def pages(root: Path = ROOT) -> list[Path]:
    """Every page of the project, relative to `root`."""
    return [path for path in project_files(root) if path.suffix == ".md"]


def todays(root: Path) -> list[Path]:
    """Pages that say what is, not what was."""
    past = Path("docs/dev/decisions")
    return [p for p in pages(root) if p.as_posix() not in NOT_TODAYS and not p.is_relative_to(past)]


def link_findings(root: Path) -> list[str]:
    """Relative links of pages to a file, or to a heading of a page, that does not exist."""
    found = []
    for page in pages(root):
        for target in LINK.findall(FENCE.sub("", (root / page).read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (root / page.parent / name).resolve() if name else root / page
            if not path.exists():
                found.append(f"{page}: links {target}, which does not exist")
            elif anchor and anchor not in anchors(path.read_text()):
                found.append(f"{page}: links {target}, but the page has no such heading")
    return found


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the Hub make them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(FENCE.sub("", page))
    }


def mention_findings(root: Path) -> list[str]:
    """Paths of docs/ in sources, tests and pages that name no file."""
    found = []
    for path in project_files(root):
        if path.as_posix() in NOT_TODAYS or (text := read_text(root / path)) is None:
            continue
        found += [
            f"{path}: names {name}, which does not exist"
            for name in sorted(set(MENTION.findall(text)))
            if not (root / name).is_file()
        ]
    return found


def source_findings(root: Path) -> list[str]:
    """Source files in backticks of a page that are the end of no path of the project."""
    files = [f"/{path.as_posix()}" for path in project_files(root)]
    found = []
    for page in todays(root):
        for name in sorted(set(SOURCE.findall((root / page).read_text())) - GENERATED):
            if not any(Path(path).match(name) for path in files):
                found.append(f"{page}: names {name}, which is no file of the project")
    return found


def named_test_findings(root: Path) -> list[str]:
    """Tests that a page names as its evidence, and that do not exist."""
    tests = [p for p in project_files(root) if p.suffix == ".py" and p.parts[0] == "tests"]
    known = {path.stem for path in tests}
    for path in tests:
        known.update(re.findall(r"\bdef (test_\w+)", (root / path).read_text()))
    found = []
    for page in todays(root):
        names = set(re.findall(r"\btest_[a-z0-9_]+\b", (root / page).read_text()))
        found += [f"{page}: names {name}, which is no test" for name in sorted(names - known)]
    return found


def command_findings(root: Path) -> list[str]:
    """Commands on pages whose target, variable or option does not exist."""
    makefile = "\n" + (root / "Makefile").read_text()
    found = []
    for page in todays(root):
        for command in COMMAND.findall((root / page).read_text()):
            program, *words = command.split()
            if program == "make":
                missing = [
                    word
                    for word in words
                    if (f"$({word.split('=')[0]}" if "=" in word else f"\n{word}:") not in makefile
                ]
            else:  # torchrun has two options of its own
                scripts = [root / word for word in words if word.endswith(".py")]
                text = "".join(script.read_text() for script in scripts if script.is_file())
                options = [word for word in words if word.startswith("--")][
                    2 * (program[0] == "t") :
                ]
                said = re.compile('"(?:--)?([a-z-]+)"').findall(text)
                missing = [option for option in options if text and option[2:] not in said]
            found += [f"{page}: {command.strip()}: no {one}" for one in missing]
    return found


CHECKS = (link_findings, mention_findings, source_findings, named_test_findings, command_findings)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_name_what_exists(check) -> None:
    assert_none(check(ROOT))


def test_a_command_that_would_fail_is_found(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "Makefile": "all:\n\techo $(N)\n",
            "run.py": 'add("--fast")\n',
            "README.md": "`make all N=2 M=3` `make none`\n```\npython run.py --fast --slow\n```\n",
        },
    )
    assert command_findings(tmp_path) == [
        "README.md: make all N=2 M=3: no M=3",
        "README.md: make none: no none",
        "README.md: python run.py --fast --slow: no --slow",
    ]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("# One & two\n[here](#one--two) [no](#three) [b](b.md)\n")
    (tmp_path / "README.md").write_text("[a](docs/a.md#one--two) [x](https://x.y/z) docs/c.md\n")
    assert link_findings(tmp_path) == [
        "docs/a.md: links #three, but the page has no such heading",
        "docs/a.md: links b.md, which does not exist",
    ]
    assert mention_findings(tmp_path) == ["README.md: names docs/c.md, which does not exist"]


def test_the_index_for_authors_has_every_page() -> None:
    """Decisions are found by subject, not by the day they were taken on."""
    folder = Path("docs/dev")
    index = (ROOT / folder / "README.md").read_text()
    names = [page.relative_to(folder).as_posix() for page in pages() if page.is_relative_to(folder)]
    missing = [name for name in names if name != "README.md" and f"]({name})" not in index]
    assert_none([f"docs/dev/README.md: has no link to {name}" for name in missing])


def test_pages_for_users_are_short() -> None:
    """Tables that are drawn or generated have as many rows as they need."""
    generated = ("docs/benchmarks/", "docs/dev/")
    limits = {page: PAGE_LINES for page in pages() if page.as_posix().startswith("docs/")}
    limits[Path("README.md")] = README_LINES
    findings = [
        f"{page}: has {lines} lines, at most {most} are read"
        for page, most in limits.items()
        if not page.as_posix().startswith(generated)
        and (lines := len((ROOT / page).read_text().splitlines())) > most
    ]
    assert_none(findings)


def test_pages_for_users_are_not_for_authors() -> None:
    """What only a kernel's author reads stands in docs/dev/: sources, instructions, proofs."""
    findings = [
        f"{page}:{number}: {found[0]} is for docs/dev/"
        for page in pages()
        if page.parts[0] in ("README.md", "CARD.md", "docs") and not page.is_relative_to("docs/dev")
        for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1)
        if (found := FOR_AUTHORS.search(line))
    ]
    assert_none(findings)


def messages(path: Path) -> Iterator[str]:
    """The strings of a Python file, with VALUE where an f-string fills something in."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def shown_messages() -> list[re.Pattern[str]]:
    """What the page on troubleshooting says of messages, as patterns of these."""
    shown = MESSAGE.findall(TROUBLESHOOTING.read_text())
    return [re.compile(".*".join(map(re.escape, message.split("…")))) for message in shown]


def logged(path: Path) -> Iterator[str]:
    """The messages that a file of the package logs as warnings, where they stand in the call."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = (
                node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            )
            if name in ("warning", "say_once"):
                yield node.args[0].value


def test_every_logged_line_is_on_the_troubleshooting_page() -> None:
    found = [(path, message) for path in PACKAGE.rglob("*.py") for message in logged(path)]
    assert len(found) >= 10
    patterns = shown_messages()
    findings = [
        f"{path.name}: {message!r} is not on {TROUBLESHOOTING.name}"
        for path, message in found
        if message.strip("%s ") and not any(pattern.search(message) for pattern in patterns)
    ]
    assert_none(findings)


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """In the package, its compiled ops, the build, the client, or Triton's launcher."""
    shown = shown_messages()
    assert len(shown) >= 25
    client = Path(find_spec("kernels").origin).parent
    ours = (PACKAGE, ROOT / "tools", ROOT / "no_variant")
    sources = [path for folder in ours for path in folder.rglob("*.py")] + [*client.glob("*.py")]
    sources.append(Path(find_spec("triton").origin).parent / "runtime/build.py")
    texts = [text for path in sources for text in messages(path)]
    texts += [path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("kernels-src/**/*.cu"))]
    findings = [
        f"{TROUBLESHOOTING.name}: {message.pattern} is in no source"
        for message in shown
        if not any(map(message.search, texts))
    ]
    assert_none(findings)


MODULES = {"checkpoint", "integrations", "layers", "moe", "muon", "tensor_parallel"}


@pytest.fixture
def reference():
    return tool("reference_pages")


@pytest.mark.parametrize("module", ["", "moe", "integrations", "layers", "tensor_parallel"])
def test_every_public_name_is_on_one_page(reference, module: str) -> None:
    path = PACKAGE / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    listed = [
        name for page in reference.PAGES.values() if page.module == module for name in page.names
    ]
    public = set(tool("hub_card").read_all(path)) - MODULES
    assert sorted(listed) == sorted(public)


def test_a_stale_page_and_a_left_one_are_found(reference, monkeypatch, tmp_path: Path) -> None:
    pages = {reference.FOLDER / name: "text\n" for name in ("a.md", "b.md")}
    monkeypatch.setattr(reference, "rendered", lambda root: pages)
    (tmp_path / reference.FOLDER).mkdir(parents=True)
    (tmp_path / reference.FOLDER / "a.md").write_text("text\n")
    (tmp_path / reference.FOLDER / "c.md").write_text("text\n")
    assert reference.stale(tmp_path) == [reference.FOLDER / name for name in ("b.md", "c.md")]


def test_no_page_is_empty(reference) -> None:
    for path, text in reference.rendered(ROOT).items():
        assert text.startswith("# ") and "\n```\n```\n" not in text, path
        assert not text.rstrip().endswith((":", "```\n")), path
