"""Entry: `python -m supervisor` and the console script `pgmq-supervisor`.

Three things happen here before anything else of ours is imported. The machine is looked at: where we cannot run, one
line says so (hence no syntax newer than Python 3.6 in this file). A supervisor that is told to stop while it still
imports ends well, also as PID 1, for which the kernel drops signals that have no function. And imports are settled:
the working directory leaves `sys.path`, and our packages are loaded from beside this file, so that neither the
application that stands in the working directory nor one on PYTHONPATH can put its own of these names in between.
"""

import os
import signal
import sys

_PYTHON = (3, 11)
_KERNEL = (5, 4)
_OTHER_COMMANDS = ("demo", "check", "init", "send", "queues", "dlq", "status", "top", "pause", "resume", "cancel")


def main() -> None:
    """Run the command line and exit with its code."""
    unsuitable = _unsuitable(sys.platform, tuple(sys.version_info[:2]))
    if unsuitable:
        sys.stderr.write(f"pgmq-supervisor: {unsuitable}\n")
        sys.exit(1)
    if not any(argument in _OTHER_COMMANDS for argument in sys.argv[1:]):
        end_well_on_early_signals()
    settle_imports()
    from supervisor.cli.app import run_command_line  # noqa: PLC0415 - imports had to be settled first

    run_command_line(sys.argv[1:])


def _unsuitable(platform: str, version: "tuple[int, ...]") -> str:
    """Say why we cannot run here; empty where we can."""
    if platform != "linux":
        return f"needs Linux 5.4 or newer (pidfds, subreapers); this is {platform}"
    if version < _PYTHON:
        return "needs Python 3.11 or newer; this is {}".format(".".join(map(str, version)))
    release = os.uname().release
    numbers = []
    for part in release.split("-")[0].split(".")[:2]:
        digits = "".join(char for char in part if char.isdigit())
        numbers.append(int(digits or 0))
    if tuple(numbers) < _KERNEL:
        return f"needs Linux 5.4 or newer (pidfds); this kernel is {release}"
    return ""


def end_well_on_early_signals() -> None:
    """Until `run` has functions of its own: TERM and INT end the process with 0, HUP and USR1 do nothing."""

    def stop(_number: int, _frame: object) -> None:
        os.write(2, b"stopped before anything was started\n")
        os._exit(0)

    def ignore(_number: int, _frame: object) -> None:
        pass

    for number, function in (
        (signal.SIGTERM, stop),
        (signal.SIGINT, stop),
        (signal.SIGHUP, ignore),
        (signal.SIGUSR1, ignore),
    ):
        signal.signal(number, function)


def settle_imports() -> None:
    """Take the working directory off `sys.path` and bind our names. The parent never imports the application."""
    import sysconfig  # noqa: PLC0415 - after the look at the version

    try:
        here = os.getcwd()
    except OSError:
        here = ""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    if here and os.path.realpath(here) in installed:
        # Somebody stands in site-packages: what it offers is needed, and nobody's application is there.
        here = ""
    sys.path[:] = [entry for entry in sys.path if not here or os.path.realpath(entry or ".") != os.path.realpath(here)]

    for name in ("supervisor", "shared"):
        _bind(name)


def _bind(name: str) -> None:
    """Let `name` mean our package, whatever has been imported under it before."""
    import importlib.util  # noqa: PLC0415 - after the look at the version

    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name)
    loaded = sys.modules.get(name)
    if loaded is not None and folder in getattr(loaded, "__path__", []):
        return
    for other in [other for other in sys.modules if other.partition(".")[0] == name]:
        del sys.modules[other]
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None, folder
    assert spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
