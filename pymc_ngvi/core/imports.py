"""Modules that take long to import, imported when they are needed."""

import importlib
import threading

from types import ModuleType


def imported(name: str) -> ModuleType:
    """Import a module in a thread of its own, and return it.

    Some packages look at every frame of the stack for each of their lazy modules: deep inside a fit, ArviZ would take
    two seconds in the place of one.
    """
    worker = threading.Thread(target=importlib.import_module, args=(name,))
    worker.start()
    worker.join()
    return importlib.import_module(name)
