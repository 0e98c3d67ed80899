"""The four modes: points, n-th, random, network."""
