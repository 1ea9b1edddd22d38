"""Traces, spans of rooms, and the Prometheus metrics that all services share.

Services create these objects at their start and pass them on. Besides `runtime` the package imports only the
core's names of rooms, causes and moments.
"""
