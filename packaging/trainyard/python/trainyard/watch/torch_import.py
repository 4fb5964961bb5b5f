"""Calls a function when the script has imported a module, so that the watch need not import torch itself."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec


def when_imported(name: str, call) -> None:
    """Calls `call` with the module: now, or right after its first import."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finds one module, once, with the finders that would find it otherwise."""

    def __init__(self, name, call):
        self._name, self._call = name, call

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._call)
        return spec


class _Loader(Loader):
    """Loads a module with its own loader, and calls a function with it."""

    def __init__(self, loader, call):
        self._loader, self._call = loader, call

    def __getattr__(self, name):
        return getattr(self._loader, name)  # such as `get_source`, for tracebacks

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._call(module)
        except Exception as error:
            print(f"trainyard.watch: {type(error).__name__}: {error}; steps are not counted", file=sys.stderr)
