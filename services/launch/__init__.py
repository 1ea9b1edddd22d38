"""Start and supervision of processes: whole stacks, and the ranks of a worker.

`baton serve` calls `serve.run_serve`, which plans the services, starts them, and restarts those that end. A
worker of several ranks calls `rank_processes.run_ranks`. Both fork workers from a server process that has all
libraries imported (`fork_server`), and report each exit that they see to the bootstrap. The package imports
the services' settings. The services' code runs in other processes, except for the report of an exit, which
loads gRPC when it is needed.
"""
