"""The supervisor: a pure core (`supervisor.core`) under a thin shell. Kept empty: importing it costs nothing."""
