"""Raises what is no Exception."""

raise KeyboardInterrupt
