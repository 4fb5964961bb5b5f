"""Puts the programs that cargo built into the wheel."""

import os
import shutil
import subprocess
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Beside the folder of this wheel lies that of torch, in whatever environment and for every Python.
RUN_PATH = "$ORIGIN/../torch/lib"
# The engine, and the library with which it uses GPUs.
PROGRAMS = ["trainyard-engine", "libtrainyard_nccl.so"]


class Programs(BuildHookInterface):
    def initialize(self, version, build_data):
        repository = Path(self.root).parents[1]
        # With the front door, as packaging/build does: with other sets of features, cargo would compile dependencies twice.
        packages = ["--package", "trainyard-engine", "--package", "trainyard-cli"]
        subprocess.run(["cargo", "build", "--locked", "--release", *packages], cwd=repository, check=True)
        built = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target")) / "release"
        folder = Path(self.directory) / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            if not (built / name).exists():
                raise SystemExit(f"{built / name} was not built: run ./setup --cuda first, for the GPU library")
            shutil.copy(built / name, folder / name)
            subprocess.run(["strip", folder / name], check=True)
            subprocess.run(["patchelf", "--set-rpath", RUN_PATH, folder / name], check=True)
            build_data["force_include"][str(folder / name)] = f"trainyard_engine/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
