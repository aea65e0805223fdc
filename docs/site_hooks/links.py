"""Makes the links of the pages work in the website as they do on GitHub.

Some pages lie outside docs/ (the README, for instance): they are added to the website under a name of
their own. Links to other files of the repository, such as examples, lead to the repository's website.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks-own.md",
}
ORIGINS = {page: origin for origin, page in PAGES.items()}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / origin)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    origin = ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = normpath(PurePosixPath(origin).parent / target)
        if not (ROOT / path).exists():
            return link[0]  # mkdocs reports it
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        if path.startswith("docs/") and path.endswith(".md"):
            return f"]({path.removeprefix('docs/')}{anchor})"
        return f"]({config.repo_url}/blob/main/{path}{anchor})"

    return LINK.sub(rewritten, markdown)
