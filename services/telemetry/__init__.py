"""What a process reports of itself to operators: traces, spans of rooms, and metrics that all services share.

Services make these objects when they start and hand them down. Besides `runtime` it imports only the core's
names of rooms, causes and moments.
"""
