"""PGMQ: statements, records, and (later) the client for those who send."""
