"""Pages of the repository outside docs/ as pages of the site, and links that hold in both.

In the repository, docs/orders.md links to ../examples/trainer.py and CONTRIBUTING.md to docs/orders.md. The site has
all of them, with the folder docs/ left out of their paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "examples/*.py",
    "results/[A-Z]*.md",
    "results/*.png",
    "results/*/report/*.md",
    "results/*/report/*.png",
)
DOCS = "docs/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[/#])([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in OUTSIDE for path in root.glob(pattern)):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    outside = page.file.generated_by is not None
    here = posixpath.dirname(page.file.src_uri if outside else DOCS + page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def in_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[1]))
        target = "index.md" if target == "README.md" else target.removeprefix(DOCS)
        return posixpath.relpath(target, folder or ".")

    return LINK.sub(in_site, markdown)
