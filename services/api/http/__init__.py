"""Handling of one HTTP request: middleware, authentication, rate limits, bodies, events, errors and metrics.

`app.create_app` wraps the FastAPI application in `middleware`. The middleware makes an `HttpExchange`, checks
the caller and counts the outcome. Routes read bodies through `request_bodies` and write streams through
`event_stream`. These files do not know the fields of any API. They may import `errors`, `settings`, `backend`
and `requests`.
"""
