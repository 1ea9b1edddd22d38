"""Timelines of requests for operators: text, lanes and drawing, made from the timeline lines of their rooms.

`routes` serves them to the web page, to `baton top` and to `baton explain`. For each request, `retry_chains`
finds its rooms and `request_timeline` builds what is shown. Nothing here changes a room.
"""
