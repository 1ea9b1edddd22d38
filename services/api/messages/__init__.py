"""Anthropic's Messages API, translated into chat requests and back.

`routes` validates a body by `message_request`, translates it into a chat request
(`message_translation`) and has it answered by `generation`. `message_rendering` writes the answer,
`anthropic_errors` the errors. These files may import all of the API but other APIs' packages.
"""
