"""Measurements that anyone can re-run: python -m benchmarks.NAME --help."""
