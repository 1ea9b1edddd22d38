"""Fields of requests: their schemas, the checks between fields, and what a request means.

Routes validate a body by `schemas`. `generation` then reads the meaning of the request once, and builds
the requests for the workers by `request_builder`. Faults are reported by the path that the caller wrote
(`validation_errors`, `field_paths`). These files may import `errors` and `text`, but nothing of `http`
or `generation`.
"""
