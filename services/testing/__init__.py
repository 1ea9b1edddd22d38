"""In-process doubles of a worker's surroundings, for tests, the simulation and benchmarks.

`MemoryTransfer` is a transfer backend over a `MemoryFabric` with planned faults. `IdleWork` is a worker
without rooms. The product imports nothing of this package.
"""
