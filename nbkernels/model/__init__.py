"""A minimal decoder-only transformer runtime on the operations: read a checkpoint, keep its KV cache, generate text."""
