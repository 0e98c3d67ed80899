"""Deliberate faults: each guard of the design is broken in a copy of the code, and some test must notice.

faults ──▶ what is broken, and which tests are asked        tree ──▶ a copy of the code, mended after each fault
python -m tests.mutation [--only TEXT] [--report docs/verification.md]
"""
