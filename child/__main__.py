"""Entry of a child, executed by path: `python -u -P .../child/__main__.py ...`.

    __main__.py IN_FD OUT_FD STACK_FD PARENT_PID QUEUE [padding]     serve a queue, see docs/protocol.md
    __main__.py --check MODULE:FUNCTION MODE APP_DIR RESULT_FD       import a handler, write one JSON line, end

Our package root stands in front of `sys.path` only while our own modules are imported: neither a PYTHONPATH with a
package `shared` nor the application's own one can get between. The padding makes room for the process title, which
cannot be longer than the command line was.
"""

from __future__ import annotations

import sys


def _main() -> None:
    root = __file__.rpartition("/")[0].rpartition("/")[0] or "/"
    # Without -P Python puts our own folder in front, where `message` or `loader` would hide modules of a handler.
    if sys.path and sys.path[0] == root + "/child":
        del sys.path[0]
    foreign = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in {"child", "shared"}
    }
    sys.path.insert(0, root)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--check"]:
        from child.check import check  # noqa: PLC0415 - the path had to be set first

        check(*arguments[1:5], root=root, foreign=foreign)
    else:
        from child.process import take_over  # noqa: PLC0415 - nothing else is imported before death is arranged for

        in_fd, out_fd, stack_fd, parent_pid = (int(argument) for argument in arguments[:4])
        ends = take_over(in_fd, out_fd, stack_fd, parent_pid=parent_pid)

        from child.bootstrap import serve  # noqa: PLC0415 - see above

        serve(ends, root=root, foreign=foreign)


# A handler that starts processes by `multiprocessing` makes them import this file under another name.
if __name__ == "__main__":
    _main()
