"""Benchmarks of a worker's turn and of the agreement of its ranks."""
