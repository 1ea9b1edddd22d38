"""Benchmarks of whole stacks and of other systems under load."""
