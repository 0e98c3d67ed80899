"""A folder for PYTHONPATH; nothing here is imported as a package."""
