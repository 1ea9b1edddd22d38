"""One HTTP exchange: middleware, authentication, rate limits, bodies, events, errors and metrics.

`app.create_app` puts `middleware` around the framework. The middleware makes an `HttpExchange`, checks
the caller and counts the outcome. Routes read bodies by `request_bodies` and write streams by
`event_stream`. These files know no API's fields: they may import `errors`, `settings`, `backend` and
`requests`.
"""
