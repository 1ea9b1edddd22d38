"""In-process replacements for a worker's network, for tests, the simulation and benchmarks.

`MemoryTransfer` is a transfer backend over a `MemoryFabric` with planned faults. `IdleWork` is a worker
without rooms. Production code imports nothing of this package.
"""
