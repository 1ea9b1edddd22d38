"""Life of a worker's process: start-up of its ranks, lease, status pages, drain and exit.

`baton.worker.wiring` starts it. It imports the wire, the runtime and `baton.worker`, and nothing of one
role.
"""
