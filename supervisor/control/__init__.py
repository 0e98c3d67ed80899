"""Steering a running supervisor: what can be asked of it, and the private socket over which the command line asks."""
