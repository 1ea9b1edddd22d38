"""The router: it knows workers by their leases, opens a room for each request, and follows it to its end.

`wiring.run` starts it. Workers call `bootstrap_services`. The HTTP API calls `room_backend.RoomBackend`. A
request then passes `admission`, `request_stream`, `room_stream` and `worker_streams` in this order. What
`baton.fleet` decides, `room_controller` carries out. The package may import everything but torch, the engine
and the packages of workers.
"""
