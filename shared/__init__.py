"""Code that parent and child share; imports neither."""
