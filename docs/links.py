#!/usr/bin/env python3
"""Checks that every link between pages of the book leads to a page and a heading that exist. Run it after `docs/build` has built both editions."""

import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
LINK = re.compile(r"\]\(([a-z0-9-]+\.md)?(?:#([\w-]+))?\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def broken_links(source: pathlib.Path, book: pathlib.Path) -> list[str]:
    """The links of an edition that lead nowhere, and its pictures that do not exist."""
    built = {page.stem: page.read_text() for page in book.glob("*.html")}
    broken = []
    for page in sorted(source.glob("*.md")):
        name = page.relative_to(DOCS)
        for target, heading in LINK.findall(page.read_text()):
            html = built.get(pathlib.Path(target or page.name).stem)
            if html is None or (heading and f'id="{heading}"' not in html):
                broken.append(f"{name}: no {target or page.name}{'#' + heading if heading else ''}")
        pictures = PICTURE.findall(page.read_text())
        broken += [f"{name}: no {picture}" for picture in pictures if not (book / picture).exists()]
    return broken


broken = broken_links(DOCS / "src", DOCS / "book") + broken_links(DOCS / "zh" / "src", DOCS / "book" / "zh")
print("\n".join(broken) or "all links between pages lead somewhere")
sys.exit(bool(broken))
