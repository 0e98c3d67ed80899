"""Entry: `python -m crashtests`.

Before anything else of ours is imported, the working directory leaves `sys.path`: an application that stands there may
have packages with our names, and is imported by children and probes only, never by the harness itself.
"""

import importlib.util
import os
import sys


def main() -> None:
    """Run the command line."""
    _settle_imports()
    from crashtests.cli import app  # noqa: PLC0415 - imports had to be settled first

    app()


def _settle_imports() -> None:
    """Take the working directory off the path, and our own root to its front: `shared` must be ours."""
    here = os.path.realpath(os.getcwd())
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    for name in ("shared", "supervisor"):
        folder = os.path.join(root, name)
        spec = importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
