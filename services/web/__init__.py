"""HTTP servers of the services: uvicorn in the service's own event loop, and bounds on what clients may take.

A service binds its port (`runtime.listening_ports`), then calls `http_server.serve_http` with its
application. It knows no route but those of `status_pages`. It imports only `runtime` of this project.
"""
