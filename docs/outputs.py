#!/usr/bin/env python3
"""Runs the commands of the book whose output is shown below them, and compares or replaces it.

    docs/outputs.py            replaces the outputs of all chapters, in English and in Chinese
    docs/outputs.py --check    fails if the book shows something else

A command is a block `sh`, and its output the block after it; a line `...` stands for lines that are left out:

    text,output      the same on every machine
    text,measured    with measured figures, and with what the command logs; only the words between the figures are compared

The commands run with the programs of target/release, in a folder that has only `configs` and `target` of the repository.
"""

import argparse
import difflib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
PROGRAMS = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"
SHOWN = re.compile(
    r"(?<=^```sh\n)(?P<command>[^`]*)^```\n\n```text,(?P<kind>output|measured)\n(?P<output>.*?)(?=^```$)", re.MULTILINE | re.DOTALL
)
LEFT_OUT = "..."
# What a log begins with that nobody watches.
TIMESTAMP = re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z +")
# A figure with its unit and what fills the column of a table up to it, or the name of a parameter that has such a figure.
FIGURE = re.compile(r"\s*\bmodel\.[\w.]+|\s*[-+]?\d[\d,.]*(e-?\d+)?\s*(([KMGT]i?)?B|[mu]?s)?\b")


def run(command: str, kind: str) -> list[str]:
    """What a command prints. A plan that does not fit exits with 1, and that is an output too."""
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}
    logs = subprocess.STDOUT if kind == "measured" else subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        for name in ("configs", "target"):
            (pathlib.Path(folder) / name).symlink_to(ROOT / name)
        ran = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=logs, text=True)
    if ran.returncode > 1 or not ran.stdout:
        sys.exit(f"outputs: {command.strip()}\n{ran.stderr or ran.stdout}")
    return [TIMESTAMP.sub("", line).rstrip() for line in ran.stdout.rstrip().splitlines()]


def is_excerpt(shown: list[str], printed: list[str]) -> bool:
    """Whether lines of the output are shown in their order, and without gaps but where it says `...`."""
    place = 0
    for left_out, group in itertools.groupby(shown, lambda line: line == LEFT_OUT):
        part = list(group)
        starts = range(place, len(printed) - len(part) + 1)
        start = next((start for start in starts if printed[start : start + len(part)] == part), None)
        if start is None and not left_out:
            return False
        place = place if left_out else start + len(part)
    return LEFT_OUT in shown


def with_figures(shown: list[str], printed: list[str]) -> list[str]:
    """The lines that are shown, with the figures of this run; all lines if this run has not printed one of them.

    Between them a run may print more, such as a warning about a slow rank."""
    lines = iter(printed)
    result = []
    for line in shown:
        pattern = FIGURE.sub("#", line)
        found = line if line == LEFT_OUT else next((now for now in lines if FIGURE.sub("#", now) == pattern), None)
        if found is None:
            return printed
        result.append(found)
    return result


def current(shown: list[str], printed: list[str], kind: str) -> tuple[list[str], bool]:
    """What is to be shown, and whether that is more than other figures."""
    if kind == "measured":
        lines = with_figures(shown, printed)
        return lines, len(lines) != len(shown) or lines is printed
    is_current = shown == printed or is_excerpt(shown, printed)
    return (shown if is_current else printed), not is_current


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    known: dict[tuple[str, str], list[str]] = {}
    num_stale = 0
    for page in [*sorted((DOCS / "src").glob("*.md")), *sorted((DOCS / "zh" / "src").glob("*.md"))]:
        text = page.read_text()
        for found in reversed(list(SHOWN.finditer(text))):
            command, kind = found["command"], found["kind"]
            if (command, kind) not in known:
                known[command, kind] = run(command, kind)
            shown = found["output"].splitlines()
            now, is_stale = current(shown, known[command, kind], kind)
            text = text[: found.start("output")] + "\n".join(now) + "\n" + text[found.end("output") :]
            num_stale += is_stale
            if is_stale and args.check:
                print("\n".join(difflib.unified_diff(shown, now, str(page), command.strip(), lineterm="")))
        if not args.check:
            page.write_text(text)
    print(f"{len(known)} commands; outputs that differ: {num_stale}")
    if args.check and num_stale:
        sys.exit("outputs: run docs/outputs.py to replace them")


if __name__ == "__main__":
    main()
