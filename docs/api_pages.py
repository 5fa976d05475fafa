"""A hook of mkdocs: a page of the API for every package that pyproject.toml lists, with all of its public modules."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDERS = {"f3rm_ext.method_configs": ROOT / "method_configs"}
"""Packages that do not lie where their name says."""
GUIDES = {
    "capture": "datamanager",
    "data": "datamanager",
    "export": "query",
    "features": "extractors",
    "features.store": "feature-store",
    "ledger": "ledger",
    "mesh": "mesh",
    "mesh.bound": "refinement",
    "mesh.semantics": "mesh-queries",
    "mesh.texture": "texture",
    "method_configs": "methods",
    "moco": "moco",
    "nerf": "methods",
    "planning": "planning",
    "preview": "viewer",
    "profiling": "profiling",
    "query": "query",
    "sfm": "sfm",
    "sfm.diffusion": "sfm-diffusion",
    "splat": "splats",
    "splat.files": "splat-files",
    "synthetic": "synthetic-scene",
    "viewer": "viewer",
    "workflow": "sugar-run",
}
"""The page that explains a package to its users."""


def packages() -> list[str]:
    """Returns the packages of the wheel, sorted, as pyproject.toml lists them."""
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("packages = [")[1].split("]")[0]
    return sorted(re.findall(r'"([\w.]+)"', section))


def modules(package: str) -> list[str]:
    """Returns the public modules of a package, the package itself first."""
    folder = FOLDERS.get(package, ROOT / package.replace(".", "/"))
    found = sorted(path.stem for path in folder.glob("[!_]*.py"))
    # griffe finds a mapped package by the name of its folder.
    name = folder.relative_to(ROOT).as_posix().replace("/", ".")
    return [name, *(f"{name}.{stem}" for stem in found)]


def page(package: str) -> str:
    """Returns the Markdown of a package's page."""
    name = package.removeprefix("f3rm_ext.")
    guide = ""
    if name in GUIDES:
        path = f"{GUIDES[name]}.md"
        title = (ROOT / "docs" / path).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        guide = f"The guide is [{title}](../{path}).\n\n"
    if package == "f3rm_ext":  # its own docstrings are those of api
        blocks = [module for module in modules(package)[1:] if module != "f3rm_ext.api"]
    else:
        blocks = modules(package)
    return f"# {package}\n\n{guide}" + "".join(f"::: {module}\n" for module in blocks)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows Sphinx's roles of docstrings, such as ``:class:`~a.b.Name```, as plain code."""
    return re.sub(r":(?:class|func|meth|mod|attr|data):<code>(?:~[\w.]*\.)?([\w.]+)</code>", r"<code>\1</code>", html)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages to the section Python of the navigation."""
    (python,) = (section["Python"] for section in config.nav or [] if "Python" in section)
    python += [{package.removeprefix("f3rm_ext."): f"api/{package}.md"} for package in packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for package in packages():
        files.append(File.generated(config, f"api/{package}.md", content=page(package)))
    return files
