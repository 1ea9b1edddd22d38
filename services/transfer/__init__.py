"""Transfer of bytes between the memories of two workers: one protocol, and its backend NIXL.

`Transfer` (`transfer_protocol`) is the protocol. `NixlTransfer` works between processes. An in-process
backend for tests is `baton.testing.memory_transfer`. Workers use an `Exposure`, which registers memory with
a backend and can move it out of reach of its peers. The package imports `baton.ids` and the runtime. Only
`nixl` and `nixl_library` import NIXL.
"""
