"""Benchmarks of the bootstrap alone: requests a second and placement."""
