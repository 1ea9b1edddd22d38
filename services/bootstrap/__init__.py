"""Router (bootstrap): it registers workers with leases, opens a room for each request, and follows the room
to its end.

`wiring.run` starts it. Workers call `bootstrap_services`. The HTTP API calls `room_backend.RoomBackend`. A
request then passes `admission`, `request_stream`, `room_stream` and `worker_streams` in this order.
`baton.fleet` makes the decisions, and `room_controller` carries them out. The package may import everything
but torch, the engine and the packages of workers.
"""
