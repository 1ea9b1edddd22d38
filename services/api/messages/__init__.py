"""Anthropic's Messages API, translated into chat requests and back.

`routes` validates a body by `message_request`, translates it into a chat request (`message_translation`), and
passes it to `generation`. `message_rendering` writes the answer, `anthropic_errors` the errors. These modules
may import all of `api` except the packages of other APIs.
"""
