"""Benchmarks of Baton's parts, run as `python -m bench` in a source tree.

Each command measures a part beside its limit and prints one JSON object. Nothing in the product imports
this package. It imports the product's public names only.
"""
