"""Streams that can be continued: ids of events, and the reading of an id that a client sends back.

Every event of a streamed answer has an id. A client whose connection broke sends the same request again, with
the last id in the header `Last-Event-ID`. Any router with the same key then computes the answer again, and
sends the events behind that one (`stream-is-prefix`). These files may import `errors` and `http`.
"""
