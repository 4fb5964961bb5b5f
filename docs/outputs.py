#!/usr/bin/env python3
"""Runs the commands of the book whose output is shown below them, and compares or replaces it.

    docs/outputs.py            replaces the outputs of all chapters, in English and in Chinese
    docs/outputs.py --check    fails if the book shows something else

A command is a block `sh`, and its output the block `text,output` after it; a line `...` stands for lines that are left out. Such
commands have the same output on every machine: timings do not belong here. They run at the root of the repository, with the programs of target/release.
"""

import argparse
import difflib
import os
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
PROGRAMS = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"
SHOWN = re.compile(r"(?<=^```sh\n)(?P<command>[^`]*)(?P<between>^```\n\n```text,output\n)(?P<output>.*?)(?=^```$)", re.MULTILINE | re.DOTALL)


def run(command: str) -> str:
    """What a command prints. A plan that does not fit exits with 1, and that is an output too."""
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode > 1 or not ran.stdout:
        sys.exit(f"outputs: {command.strip()}\n{ran.stderr}")
    lines = ran.stdout.rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def is_excerpt(shown: str, printed: str) -> bool:
    """Whether the lines of an excerpt are in the output, in the same order and without gaps but where it says `...`."""
    place = 0
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        # Empty lines around what is left out may be left out too.
        place = printed.find(part.strip("\n"), place)
        if place < 0:
            return False
    return "\n...\n" in shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    known: dict[str, str] = {}
    num_stale = 0
    for page in [*sorted((DOCS / "src").glob("*.md")), *sorted((DOCS / "zh" / "src").glob("*.md"))]:
        text = page.read_text()
        for found in reversed(list(SHOWN.finditer(text))):
            command = found["command"]
            if command not in known:
                known[command] = run(command)
            shown, printed = found["output"], known[command]
            if shown == printed or is_excerpt(shown, printed):
                continue
            num_stale += 1
            if args.check:
                diff = difflib.unified_diff(shown.splitlines(), printed.splitlines(), str(page), command.strip(), lineterm="")
                print("\n".join(diff))
            text = text[: found.start("output")] + printed + text[found.end("output") :]
        if not args.check:
            page.write_text(text)
    print(f"{len(known)} commands; outputs that differ: {num_stale}")
    if args.check and num_stale:
        sys.exit("outputs: run docs/outputs.py to replace them")


if __name__ == "__main__":
    main()
