"""The kernels, one file an operation: formula, walk, kernel, plan, cost."""
