"""The integration tests against every version of PostgreSQL and PGMQ that can be had here.

    python -m tests.matrix                     every cell
    python -m tests.matrix --cell 15:1.11.1    one cell; may be repeated
    python -m tests.matrix --smoke             a short selection of tests
    python -m tests.matrix --json              for machines

Programs and SQL are fetched through pip and npm into .cache/matrix of the checkout. What cannot be had, and so is not
run, is told with its reason.
"""
