"""Whose `shared` is it? The path of our own code against the path of the application.

All our modules are imported before the handler, and nothing of ours is imported later. So our names can be handed
over to an application that has packages called like ours, and we go on working with what we hold.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Final

OUR_NAMES: Final = ("shared", "child", "supervisor")


def hand_over_imports(*, root: str, app_dir: str, foreign: dict[str, ModuleType]) -> None:
    """From here on imports are the application's: its folder first, our root only where it was before.

    `foreign`: modules with our names that somebody had imported before us.
    """
    if root in sys.path:
        sys.path.remove(root)  # the entry that we put in front; an installed package has another one
    while app_dir in sys.path:
        sys.path.remove(app_dir)
    sys.path.insert(0, app_dir)
    for name in OUR_NAMES:
        theirs = _find(name, app_dir)
        if theirs is None or _is_ours(theirs, root):
            continue
        _forget(name)
        if theirs.loader is None or theirs.origin is None:
            # A folder without __init__.py would lose against any regular package further down the path: ours.
            sys.modules[name] = module_from_spec(theirs)
    sys.modules.update({name: module for name, module in foreign.items() if name not in sys.modules})


def _find(name: str, app_dir: str) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(name, [app_dir])
    except (ImportError, ValueError, OSError):
        return None


def _is_ours(found: ModuleSpec, root: str) -> bool:
    """Whether the application's folder is our own root: the handlers of our tests live there."""
    return (
        found.origin is not None
        and found.origin.startswith(root + "/")
        and PathFinder.find_spec(found.name, [root]) == found
    )


def _forget(name: str) -> None:
    for loaded in list(sys.modules):
        if loaded == name or loaded.startswith(name + "."):
            del sys.modules[loaded]
