"""Benchmarks of the whole product: ``python -m benchmarks [suite ...]``, one file a suite."""
