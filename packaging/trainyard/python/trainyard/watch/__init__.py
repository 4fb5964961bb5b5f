"""Lets `trainyard run` watch a PyTorch script that knows nothing of Trainyard.

A daemon thread of the script's process writes the heartbeats of its rank: the step, counted at the optimizer; and,
when no step ends for a while, the position of the main thread and the collectives in flight. Nothing is
wrapped or replaced, so the script computes what it computes without the watch.

    python -m trainyard.watch script.py args...
    trainyard run --watch ... python script.py args...
"""

from .worker import start

__all__ = ["start"]
