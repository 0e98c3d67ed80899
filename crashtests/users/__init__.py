"""The same kills, on a handler of somebody else: `python -m crashtests run`."""
