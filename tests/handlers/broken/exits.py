"""Exits while it is imported."""

import sys

print("noise on stdout")
sys.exit(0)
