"""Starts the watch in every Python process that has this folder on its PYTHONPATH, as `trainyard run --watch` sets it.

Python imports the first `sitecustomize` of its path before it runs a script. This one then gives way to the next.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    if os.environ.get("TRAINYARD_WATCH", "0") == "0" or "TRAINYARD_HEARTBEAT_OFFSET" not in os.environ:
        return
    packages = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
    # Last, and only for now: packages beside this one must not hide those of the script.
    is_new = packages not in sys.path
    sys.path += [packages] * is_new
    try:
        import trainyard.watch

        trainyard.watch.start()
    except Exception as error:
        print(f"trainyard.watch: {type(error).__name__}: {error}; this rank is not watched", file=sys.stderr)
    finally:
        if is_new:
            sys.path.remove(packages)


def _load_next() -> None:
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


# The script sees the path that it would have without the watch.
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _FOLDER]
_start()
_load_next()
