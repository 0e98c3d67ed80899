"""`pgmq-supervisor demo`: good and bad messages, a real service process, a live view, a closing account."""

from supervisor.demo.main import main

__all__ = ["main"]
