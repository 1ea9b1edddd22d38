"""gRPC messages and connections between the router and workers: conversions, errors, channels, credentials.

`X_to_wire` makes a message. `X_from_wire` reads and checks one, and raises `Malformed`. The router and the
workers call both. The package imports the core, `runtime` and gRPC, and neither the router nor workers. The
folder `baton` holds generated code.
"""
