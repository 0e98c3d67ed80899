"""Benchmarks: ratios measured in one run on one machine, never asserts on seconds. `make bench`."""
