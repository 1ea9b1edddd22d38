"""Timelines of requests for operators: text, lanes and drawing, made from the lines of their rooms.

`routes` serves them to the page and to `baton top` and `baton explain`. For each request, `retry_chains`
finds its rooms and `request_timeline` builds what is shown. Nothing here changes a room.
"""
