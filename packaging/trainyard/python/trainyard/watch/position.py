"""Where the main thread is: the line of the script, and the line of the library that it called."""

import os
import sys
import threading

_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TRAINYARD = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def main_thread_position() -> str:
    """The position as text, such as `train.py:41 in train_step (torch/autograd/graph.py:865 in ...)`."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident)
    if innermost is None:
        return ""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame is innermost:
        return _describe(innermost)
    return f"{_describe(frame)} ({_describe(innermost)})"


def _is_library(path: str) -> bool:
    is_installed = any(folder in path for folder in _PACKAGES)
    # Code without a file, such as `<frozen runpy>`, is not the script's either.
    return is_installed or path.startswith((_STDLIB, _TRAINYARD, _torch(), "<"))


def _torch() -> str:
    """The folder of torch. It is not a package folder if torch was built from source."""
    path = getattr(sys.modules.get("torch"), "__file__", None)
    return os.path.dirname(path) + os.sep if path else "<"


def _describe(frame) -> str:
    path = frame.f_code.co_filename
    return f"{_short(path)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _short(path: str) -> str:
    for folder in _PACKAGES:
        if folder in path:
            return path.rpartition(folder)[2]
    return path.removeprefix(_STDLIB) if path.startswith(_STDLIB) else os.path.basename(path)
