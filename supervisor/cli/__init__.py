"""The command line. Thin: each command says what it needs, calls a room of the supervisor, and shows the result.

`app` assembles the commands, `arguments` arranges what was typed, `failures` turns errors into one message and an exit
code, `output` shows tables. Modules of commands import what is heavy only when their command runs: `--help` is instant.
"""
