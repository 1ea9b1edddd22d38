"""Admission of requests: a room at once, a place in a bounded queue, or a rejection.

`Admission` opens every room. `QueueBounds` says which requests may wait, `ReadyWait` has those that wait for
a ready worker, and `DecodePromises` those that a draining decode worker still serves.
"""
