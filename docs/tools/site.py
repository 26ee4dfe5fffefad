"""A hook of mkdocs: the site is made of the pages of the repository, wherever they lie, with links that work there.

README, BENCHMARKS and the like become pages of the site. A link to a source file goes to a page that shows it; any
other linked file is copied. After the build every link of every page is followed.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    "examples/own_model/README.md": "examples/own_model.md",
    "examples/adapting/README.md": "examples/adapting.md",
    "examples/vllm/README.md": "examples/vllm.md",
}
"""Pages outside of docs/, and where they stand in the site."""
SHOWN = {".py": "python", ".yaml": "yaml", ".jsonl": "json", "": "text"}
"""Files that have a page of their own when a page links to them, and their language."""
_LINK = re.compile(
    r"(?P<before>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<to>[^)\s]+)(?P<after>\))|(?P<src>src=\")(?P<image>[^\"]+)"
)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and what pages link to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    sources = [(path, ROOT / path) for path in PAGES]
    sources += [(f"docs/{file.src_uri}", Path(str(file.abs_src_path))) for file in files if _in_docs(file)]
    for path, source in sources:
        for target in _targets(source.read_text(encoding="utf-8"), path):
            uri, file = _uri(target), ROOT / target
            if uri is None or files.get_file_from_path(uri) is not None or not file.is_file():
                continue
            if uri.endswith(".md") and not target.endswith(".md"):
                shown = f"# {target}\n\n``````{SHOWN[file.suffix]}\n{file.read_text(encoding='utf-8')}\n``````\n"
                added = File.generated(config, uri, content=shown, inclusion=InclusionLevel.NOT_IN_NAV)
            else:
                added = File.generated(config, uri, abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    path = _path(page.file)
    if path is None:
        return markdown

    def linked(match: re.Match[str]) -> str:
        to = match["to"] or match["image"]
        address, anchor = urldefrag(to)
        if not address or re.match(r"\w+:", address):
            return match[0]
        target = _joined(path, address)
        uri = _uri(target)
        if uri is None or not (ROOT / target).is_file():
            if (ROOT / target).is_dir():  # a folder has no page: its name stands there alone
                return match["before"].removeprefix("[").removesuffix("](")
            return match[0]  # which mkdocs then warns of
        at = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        if match["image"]:
            url = posixpath.relpath(uri, page.file.url.rstrip("/") or ".")
            return f"{match['src']}{url}"
        return f"{match['before']}{at}{'#' + anchor if anchor else ''}{match['after']}"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(linked, part) for part in parts[::2]]
    return _whole_links("".join(parts), linked)


def _whole_links(markdown: str, linked: Any) -> str:
    """Links whose words are code, which stand across the parts."""
    code_link = re.compile(
        r"(?P<before>!?\[[^\[\]\n]*`[^`\n]+`[^\[\]\n]*\]\()(?P<to>[^)\s]+)(?P<after>\))(?P<src>)(?P<image>)"
    )
    return code_link.sub(linked, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Name what screen readers find nameless in the theme, and let tables that are too wide be scrolled by keyboard."""
    named = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    return named.replace("<table>", '<table tabindex="0">')


def on_post_build(*, config: MkDocsConfig) -> None:
    """Follow every link and image of every page that was built."""
    site = Path(config.site_dir)
    pages = {file: _Links(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    for file, page in pages.items():
        if file.name == "404.html":  # its links are absolute: it is shown under any address
            continue
        for link in page.links:
            address, anchor = urldefrag(html.unescape(link))
            if re.match(r"\w+:|//", address):
                continue
            target = (file.parent / unquote(address)).resolve() if address else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                log.warning(f"{file.relative_to(site)}: nothing lies at {link}")
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                log.warning(f"{file.relative_to(site)}: {link} has no such place")


class _Links(HTMLParser):
    """What a page links to, and the places that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.ids.add(value)


def _in_docs(file: File) -> bool:
    return file.src_uri.endswith(".md") and file.src_uri not in PAGES.values() and file.inclusion.is_included()


def _path(file: File) -> str | None:
    """Where the source of a page lies in the repository."""
    for path, uri in PAGES.items():
        if file.src_uri == uri:
            return path
    return f"docs/{file.src_uri}" if (ROOT / "docs" / file.src_uri).is_file() else None


def _joined(path: str, address: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), address))


def _uri(target: str) -> str | None:
    """Where a file of the repository stands in the site; None outside of the repository."""
    if target.startswith(".."):
        return None
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md" if Path(target).suffix in SHOWN else f"source/{target}"


def _targets(text: str, path: str) -> list[str]:
    """Files that a page links to."""
    addresses = [urldefrag(match["to"] or match["image"])[0] for match in _LINK.finditer(text)]
    return [_joined(path, address) for address in addresses if address and not re.match(r"\w+:", address)]
