#!/usr/bin/env python3
"""Writes cuda_operators.inc: the operators that the installed CUDA build of torch has a CUDA kernel for.

Needs no GPU. Run it again when libtorch changes.
"""

import pathlib

import torch


def main():
    names = sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    )
    if not names:
        raise SystemExit("this build of torch has no CUDA kernels")
    lines = [f"// From torch {torch.__version__} by cuda_operators.py.\n"]
    lines += [f'"{name}",\n' for name in names]
    pathlib.Path(__file__).with_name("cuda_operators.inc").write_text("".join(lines))
    print(f"{len(names)} operators")


if __name__ == "__main__":
    main()
