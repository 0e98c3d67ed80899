"""HTTP on loopback: probes, metrics, status, and actions behind a token. A hostile client cannot hurt the loop."""
