"""Benchmarks of page transfers between processes."""
