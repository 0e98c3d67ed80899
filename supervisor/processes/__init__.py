"""Hands of the supervisor for processes: launch, talk, watch, kill, sweep, guard. Policy lives in the core.

Kept empty on purpose: the guard, which must start fast and stay small, imports single modules of this package.
"""
