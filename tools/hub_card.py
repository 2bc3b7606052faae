"""Fill CARD.md, the template of the Hub's page, as the official builder does.

``python tools/hub_card.py`` prints the card; tools/publish.py sends it as README.md.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from local_build import BuildError
from local_build.project import Project, load_project

ROOT = Path(__file__).resolve().parent.parent


def render_card(project: Project) -> str:
    """Fill the template with the official builder's variables.

    Raises:
        BuildError: Without CARD.md or a literal ``__all__``, or for an unknown variable.
    """
    import jinja2

    template = project.root / "CARD.md"
    if not template.is_file():
        raise BuildError(f"{template} does not exist; it is the template of the Hub's page")
    # The builder renders with minijinja and trim_blocks. It takes an unknown variable for empty;
    # here it is an error, because a page with holes is noticed too late.
    environment = jinja2.Environment(
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown, not HTML
    )
    names = read_all(project.package_dir / "__init__.py")
    try:
        return environment.from_string(template.read_text()).render(
            repo_id=project.repo_id,
            version=project.version,
            license=project.license.lower(),
            upstream=project.upstream,
            source=project.source,
            functions=[name for name in names if name != "layers"],
            layers=_layer_names(project.package_dir) if "layers" in names else [],
            has_benchmark=any((project.root / "benchmarks").glob("benchmark*.py")),
        )
    except jinja2.TemplateError as error:
        raise BuildError(f"CARD.md: {error}") from error


def read_all(path: Path) -> list[str]:
    """The literal ``__all__`` of a module, read without importing it."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
        ):
            try:
                return list(ast.literal_eval(statement.value))
            except ValueError as error:
                raise BuildError(f"{path}: __all__ must be a literal list of strings") from error
    raise BuildError(f"{path}: no __all__, which is the list of public names")


def _layer_names(package: Path) -> list[str]:
    tree = ast.parse((package / "layers.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


if __name__ == "__main__":
    try:
        print(render_card(load_project(ROOT)), end="")
    except BuildError as error:
        sys.exit(f"error: {error}")
