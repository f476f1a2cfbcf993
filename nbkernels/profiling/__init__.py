"""Looking at kernels: what they compile to, and what each line of them does."""
