"""Fields of requests: their schemas, the checks between fields, and what a request means.

Routes validate a body by `schemas`. `generation` then reads the meaning of the request once, and builds the
requests for the workers by `request_builder`. Errors name a field by its path in the client's own body
(`validation_errors`, `field_paths`). These files may import `errors` and `text`, but nothing of `http` or
`generation`.
"""
