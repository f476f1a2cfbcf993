"""What the operations cost, beside what they must move and beside their peers: ``python -m benchmarks NAME``."""
