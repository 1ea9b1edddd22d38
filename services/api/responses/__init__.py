"""OpenAI's Responses API, translated into chat requests and back, and the store of its responses.

`routes` validates a body by `response_request`, adds stored items (`response_store`), translates it into a
chat request (`response_translation`, `input_messages`), and passes it to `generation`. `response_builder` and
`response_rendering` write the response. These modules may import all of `api` except the packages of other
APIs.
"""
