"""The console script `pgmq-supervisor`, under a name that no application has.

An application may have a package `supervisor` of its own, and PYTHONPATH may put it in front of ours: so ours is not
imported by its name here, but executed from beside this file. It then sees to its own imports.
"""

import os
import runpy


def main() -> None:
    """Run the command line."""
    ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor", "__main__.py")
    runpy.run_path(ours, run_name="__main__")


if __name__ == "__main__":
    main()
