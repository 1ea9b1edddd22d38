"""Reports of a process to its operators: traces, spans of rooms, and metrics that all services share.

Services create these objects at their start and pass them on. Besides `runtime` the package imports only the
core's names of rooms, causes and moments.
"""
