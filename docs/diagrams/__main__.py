#!/usr/bin/env python3
"""Draws the pictures of the strategies for both books.

python3 docs/diagrams            writes docs/src/images/NAME.svg and docs/zh/src/images/NAME.svg
python3 docs/diagrams --check    names the files that differ from what it would write
"""

import pathlib
import sys
from types import ModuleType

import asynchronous
import context_parallel
import data_parallel
import ddp_buckets
import elastic
import expert_groups
import experts
import fsdp_unit
import layer_operator_tensor
import overview
import pipeline
import sequence_parallel
import tensor_parallel
import zero_stages
from style import CHINESE, ENGLISH, Picture

DOCS = pathlib.Path(__file__).resolve().parent.parent
BOOKS = {ENGLISH: DOCS / "src" / "images", CHINESE: DOCS / "zh" / "src" / "images"}
PICTURES = {
    "overview": overview,
    "data-parallel": data_parallel,
    "ddp-buckets": ddp_buckets,
    "zero-stages": zero_stages,
    "fsdp-unit": fsdp_unit,
    "tensor-parallel": tensor_parallel,
    "sequence-parallel": sequence_parallel,
    "context-parallel": context_parallel,
    "pipeline": pipeline,
    "layer-operator-tensor": layer_operator_tensor,
    "experts": experts,
    "expert-groups": expert_groups,
    "async": asynchronous,
    "elastic": elastic,
}


def drawn(topic: ModuleType, language: int) -> str:
    picture = Picture(topic.TITLE, topic.DESCRIPTION, language)
    topic.draw(picture)
    return picture.render()


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    files = {
        folder / f"{name}.svg": drawn(topic, language) for name, topic in PICTURES.items() for language, folder in BOOKS.items()
    }
    if arguments == ["--check"]:
        stale = [file for file, text in files.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
        for file in stale:
            print(f"{file.relative_to(DOCS.parent)} is not what docs/diagrams draws; run `python3 docs/diagrams`")
        return bool(stale)
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
