"""HTTP servers of the services: uvicorn in the service's own event loop, with limits on clients.

A service binds its port (`runtime.listening_ports`), then calls `http_server.serve_http` with its
application. The package knows no route but those of `probe_pages`. It imports only `runtime` of this project.
"""
