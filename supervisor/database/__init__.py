"""PostgreSQL as the parent sees it: claims, leases, settlements and notifications; administration besides."""

from supervisor.database.database import Database, QueueCounts

__all__ = ["Database", "QueueCounts"]
