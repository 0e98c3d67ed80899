"""What the outside sees: log, metrics, the user's sink, status. Everything here may fail without hurting the work."""
