"""What `check` looks at, one module a subject. Each yields findings as it goes; none stops the others."""
