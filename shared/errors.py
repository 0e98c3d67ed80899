"""Every error that we raise on purpose: one base that says what kind it is, where it happened, and what to do.

The category decides what a caller does (exit code, retry, dead letter); the class only reads well in an `except`.
Nothing here crosses a process boundary as an object: children send fields, never pickles.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

__all__ = [
    "Category",
    "ConfigurationError",
    "ConnectionLost",
    "DatabaseError",
    "OperationTimeout",
    "ProcessError",
    "ProtocolError",
    "SupervisorError",
    "UnsupportedError",
    "ValidationError",
]


class Category(StrEnum):
    """What kind of fault it is."""

    VALIDATION = "validation"
    CONNECTION = "connection"
    DATABASE = "database"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CONFIGURATION = "configuration"
    PROCESS = "process"


class SupervisorError(Exception):
    """The base of our errors.

    `message` says the reason; `operation` names what was being done; `sqlstate` is PostgreSQL's code where there is
    one; `detail` is for the log (a server's log tail, the offending value); `remedy` tells the reader what to do;
    `retryable` is true where the same call may succeed later and nothing was done yet.
    """

    category: Category = Category.DATABASE
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        sqlstate: str | None = None,
        detail: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = None,
        category: Category | None = None,
    ) -> None:
        """Keep the fields; what is not given falls back to the class."""
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.sqlstate = sqlstate
        self.detail = detail
        self.remedy = remedy
        self.retryable = self.default_retryable if retryable is None else retryable
        if category is not None:
            self.category = category

    def __str__(self) -> str:
        """One line for people: operation, reason, code, remedy."""
        text = f"{self.operation}: {self.message}" if self.operation else self.message
        if self.sqlstate:
            text += f" (SQLSTATE {self.sqlstate})"
        if self.remedy:
            text += f" -> {self.remedy}"
        return text

    def fields(self) -> dict[str, str | bool | None]:
        """Everything as plain values, for logs and JSON."""
        return {
            "type": type(self).__name__,
            "category": self.category.value,
            "message": self.message,
            "operation": self.operation,
            "sqlstate": self.sqlstate,
            "detail": self.detail,
            "remedy": self.remedy,
            "retryable": self.retryable,
        }


class ValidationError(SupervisorError, ValueError):
    """A value that cannot be accepted: a queue name, a delay, a size."""

    category = Category.VALIDATION


class ConfigurationError(SupervisorError):
    """The configuration cannot work, or what it names does not exist."""

    category = Category.CONFIGURATION


class ConnectionLost(SupervisorError):
    """The database cannot be reached, or the connection ended under us."""

    category = Category.CONNECTION
    default_retryable = True


class DatabaseError(SupervisorError):
    """PostgreSQL answered, and the answer was an error."""

    category = Category.DATABASE


class OperationTimeout(SupervisorError):
    """Something had a deadline and missed it."""

    category = Category.TIMEOUT
    default_retryable = True


class ProtocolError(SupervisorError):
    """The other side sent what it must not send."""

    category = Category.PROTOCOL


class UnsupportedError(SupervisorError):
    """The machine, the server or PGMQ cannot do what was asked."""

    category = Category.UNSUPPORTED


class ProcessError(SupervisorError):
    """A process could not be started, stopped or found."""

    category = Category.PROCESS
