"""Admission of requests: each gets a room at once, waits in a bounded queue, or is rejected.

`Admission` opens every room. `QueueBounds` decides which requests may wait. `ReadyWait` has the requests that
wait for a worker to become ready. `DecodePromises` has those that a draining decode worker still serves.
"""
