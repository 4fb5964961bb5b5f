#!/usr/bin/env python3
"""Checks that every link between pages of the book leads to a page and a heading that exist. Run it after `mdbook build docs`."""

import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
LINK = re.compile(r"\]\(([a-z0-9-]+\.md)?(?:#([\w-]+))?\)")

built = {page.stem: page.read_text() for page in (DOCS / "book").glob("*.html")}
broken = []
for page in sorted((DOCS / "src").glob("*.md")):
    for target, heading in LINK.findall(page.read_text()):
        html = built.get(pathlib.Path(target or page.name).stem)
        if html is None or (heading and f'id="{heading}"' not in html):
            broken.append(f"{page.name}: no {target or page.name}{'#' + heading if heading else ''}")
print("\n".join(broken) or "all links between pages lead somewhere")
sys.exit(bool(broken))
