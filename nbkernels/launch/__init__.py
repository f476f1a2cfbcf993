"""From a Python function to work on a GPU: compile, keep, launch; devices, streams and memory."""
