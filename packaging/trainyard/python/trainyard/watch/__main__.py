"""`python -m trainyard.watch script.py args...` runs a script, or with `-m` a module, as Python would, and watches it."""

import importlib.machinery
import io
import os
import runpy
import sys
import types

from . import start

_USAGE = "usage: python -m trainyard.watch (script.py | -m module) [args...]"


def main() -> None:
    """Runs what the command line names."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + is_module or arguments[0] in ("-h", "--help"):
        sys.exit(_USAGE)
    start()
    if is_module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        run_script(arguments[0])


def run_script(script: str) -> None:
    """Runs a script as the module `__main__`.

    Not with `runpy.run_path`, which takes `__main__` away when the script is done: then threads, atexit functions
    and pickles of the script's classes would fail.
    """
    path = os.path.abspath(script)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
