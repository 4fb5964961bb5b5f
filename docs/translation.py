#!/usr/bin/env python3
"""Compares the chapters of the Chinese book with the English ones: the same headings, code, tables, links and numbers.

Text may be worded freely; what a reader would copy, follow or cite must be the same. Give names of chapters to check only those."""

import pathlib
import re
import sys
import unicodedata
from collections import Counter

DOCS = pathlib.Path(__file__).resolve().parent
ENGLISH, CHINESE = DOCS / "src", DOCS / "zh" / "src"

FENCE = re.compile(r"^[ ]*```.*?^[ ]*```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) +(.*?)(?: *\{#([\w-]+)\})?$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:,\d+)*(?:\.\d+)?")
HAN = re.compile(r"[\u4e00-\u9fff]")


def read(page: pathlib.Path) -> str:
    """The text of a chapter, with the parts of other files that the English one includes."""

    def included(match: re.Match) -> str:
        text, name = (page.parent / match[1]).read_text(), match[2]
        return re.search(rf"<!-- ANCHOR: {name} -->\n(.*?)<!-- ANCHOR_END: {name} -->", text, re.DOTALL)[1]

    text = re.sub(r"\{\{#include ([^:}]+):(\w+)\}\}", included, page.read_text())
    # mdBook takes no attributes in the titles of parts.
    return HEADING.sub("", text) if page.name == "SUMMARY.md" else text


def anchor(heading: str) -> str:
    """The id that mdBook gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    kept = (c for c in text.lower() if c.isalnum() or c in "_- " or unicodedata.category(c) == "Mn")
    return "".join(kept).strip().replace(" ", "-")


def tables(text: str) -> list[list[int]]:
    """For every table, the number of cells in each of its rows."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            rows.append(len(re.findall(r"(?<!\\)\|", CODE.sub("", line))))
        elif rows:
            found.append(rows)
            rows = []
    return found


def target(link: str) -> str:
    """Where a link leads, from either book: they link each other, and the Chinese one takes pictures from the English one."""
    return re.sub(r"^(\.\./|zh/)+", "", link)


def untranslated(prose: str) -> list[str]:
    """Paragraphs of a Chinese chapter without a Chinese character."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", prose, flags=re.DOTALL))
    words = (p for p in paragraphs if p.strip() and not p.lstrip().startswith(("|", "#", "{{", "![")))
    return [p.strip().splitlines()[0] for p in words if re.search(r"[a-z]{3}", LINK.sub("]", CODE.sub("", p))) and not HAN.search(p)]


def differences(english: str, chinese: str) -> list[str]:
    found = []

    def compare(what: str, ours, theirs) -> None:
        if ours != theirs:
            at = next((pair for pair in zip(ours, theirs) if pair[0] != pair[1]), (len(ours), len(theirs)))
            found.append(f"{what}: English {at[0]!r}, Chinese {at[1]!r}")

    compare("code block", FENCE.findall(english), FENCE.findall(chinese))
    prose = [FENCE.sub("", text) for text in (english, chinese)]
    headings = [[(len(level), given or anchor(text)) for level, text, given in HEADING.findall(p)] for p in prose]
    compare("heading", *headings)
    compare("rows and columns of a table", *map(tables, prose))
    for what, pattern in [("code", CODE), ("link", LINK)]:
        ours, theirs = (Counter(map(target, pattern.findall(p))) for p in prose)
        found += [f"{what} missing in Chinese: {text}" for text in (ours - theirs)]
        found += [f"{what} only in Chinese: {text}" for text in (theirs - ours)]
    ours, theirs = (Counter(NUMBER.findall(LINK.sub("]", CODE.sub("", p)))) for p in prose)
    found += [f"number missing in Chinese: {number}" for number in (ours - theirs)]
    found += [f"not translated: {paragraph}" for paragraph in untranslated(prose[1])]
    return found


def main() -> int:
    names = sys.argv[1:] or sorted({page.name for book in (ENGLISH, CHINESE) for page in book.glob("*.md")})
    num_wrong = 0
    for name in names:
        pages = [book / name for book in (ENGLISH, CHINESE)]
        if missing := [page for page in pages if not page.exists()]:
            found = [f"no {page.relative_to(DOCS)}" for page in missing]
        else:
            found = differences(*map(read, pages))
        num_wrong += len(found)
        for difference in found:
            print(f"{name}: {difference}")
    if not num_wrong:
        print(f"{len(names)} chapters of the Chinese book agree with the English ones")
    return bool(num_wrong)


if __name__ == "__main__":
    sys.exit(main())
