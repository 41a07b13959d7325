"""The documentation site, from the pages of the repository.

    python -m scripts.site [--out FOLDER]     # default: .cache/site

The pages are the Markdown files that GitHub shows, unchanged: README.md is the first one, and all
others are those in `docs/` and what they link to. Sphinx builds them, and refuses a link that leads
nowhere and a page that is in no section.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / ".cache" / "site"

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Operations": (
        *("README", "install", "deploy", "run", "watch", "explain", "scale_and_drain"),
        *("priorities", "profile", "clients", "resumable_streams", "several_nodes", "failures"),
        *("troubleshooting", "metrics"),
    ),
    "Concepts": (
        "concepts",
        "architecture",
        "migration_protocol",
        "models",
        "paper_map",
        "glossary",
    ),
    "Policies and simulation": ("policies", "simulation", "traces", "emulated_engine"),
    "Evaluation": ("evaluation", "benchmarks", "performance", "gpu", "benchmarking"),
    "Reference": ("reference/options", "reference/routes", "reference/messages", "security"),
    "More": ("faq", "comparison"),
    "Internals": (
        *("README", "bugs", "failure_tests", "fault_simulation", "fidelity", "model", "mutants"),
        *("next_vllm", "parts", "vllm_names"),
    ),
    "Project": ("CONTRIBUTING", "CHANGELOG"),
}
"""The pages of each section, in order, below the folder of that section (`FOLDERS`)."""

FOLDERS = {"Operations": "docs/operations", "Internals": "docs/internals", "Project": "."}

LINK = re.compile(r"(\[[^]]*\])\(([^()\s]*)\)")
IMAGE = re.compile(r"\b(?:src|srcset)=\"([^\"]*)\"")

CONFIGURATION = """
project = "Sterna"
author = copyright = "The Sterna authors"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
html_theme = "furo"
html_title = "Sterna"
html_show_sourcelink = False
root_doc = "README"
# Traces are shown as CSV, which Pygments does not know.
suppress_warnings = ["misc.highlighting_failure"]
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; returns Sphinx's status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    out = parser.parse_args(argv).out.resolve()
    source = out / "source"
    shutil.rmtree(source, ignore_errors=True)
    images = stage(source)
    from sphinx.cmd.build import build_main

    html = out / "html"
    status: int = build_main(["-q", "-W", "--keep-going", "-b", "html", str(source), str(html)])
    if status == 0:
        # Sphinx does not see the images of HTML in a page.
        for image in images:
            shutil.copyfile(image, _copy(image, html))
        shutil.copyfile(html / "README.html", html / "index.html")
        print(f"{os.path.relpath(html, ROOT)}/index.html")
    return status


def stage(source: Path) -> set[Path]:
    """Copy the pages, and the files that they show or link to, into a folder for Sphinx.

    Returns the images that pages show in HTML.
    """
    images: set[Path] = set()
    pages = {ROOT / "README.md", *map(_path, page_names())}
    for page in sorted(pages):
        text, files = settled(page, page.read_text("utf-8"), pages)
        if page == ROOT / "README.md":
            text += _contents()
        _copy(page, source).write_text(text)
        for file in files:
            shutil.copyfile(file, _copy(file, source))
        images |= _images(page, text)
    (source / "conf.py").write_text(CONFIGURATION)
    return images


def page_names() -> Iterator[str]:
    """Yield every page but the first, by its path without the suffix, in the order of the site."""
    for section, names in SECTIONS.items():
        folder = FOLDERS.get(section, "docs")
        yield from (name if folder == "." else f"{folder}/{name}" for name in names)


def _path(name: str) -> Path:
    return ROOT / f"{name}.md"


def _copy(path: Path, source: Path) -> Path:
    copy = source / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    return copy


def settled(page: Path, text: str, pages: set[Path]) -> tuple[str, set[Path]]:
    """The page's text, without links to folders and to pages that are not in the site; and the
    other files that it shows or links to."""
    files = _images(page, text)

    def settle(link: re.Match[str]) -> str:
        shown, target = link[1], link[2]
        path = (page.parent / target.partition("#")[0]).resolve()
        if target.startswith("#") or re.match(r"[a-z]+:", target) or path in pages:
            return link[0]
        if path.is_dir() or (path.suffix == ".md" and path.exists()):
            return shown[1:-1]
        # Sphinx refuses what does not exist.
        files.update({path} if path.is_file() else ())
        return link[0]

    return LINK.sub(settle, text), files


def _images(page: Path, text: str) -> set[Path]:
    return {(page.parent / name).resolve() for name in IMAGE.findall(text) if "://" not in name}


def _contents() -> str:
    """The sections, for the sidebar."""
    trees = []
    names = iter(page_names())
    for section, of_section in SECTIONS.items():
        entries = "\n".join(next(names) for _ in of_section)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {section}\n\n{entries}\n```")
    return "\n" + "\n\n".join(trees) + "\n"


if __name__ == "__main__":
    sys.exit(main())
