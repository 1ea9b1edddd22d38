"""State of the router: registered workers, open rooms, and requests that wait for a worker.

`bootstrap` alone calls it: `Registry.register` and `renew` for workers, `place` and `open_room` for a
request, `end` and `side_retired` for its room. Requests that fit no worker wait in a `FairQueue`. A
`WaitEstimator` estimates how long they wait.

The package is pure: time is an argument, and randomness is injected. It imports `rooms`, `topology` and
`ids`. No worker imports it.
"""
