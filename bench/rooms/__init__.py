"""Benchmarks of rooms: their hand-over, their number a second, several answers."""
