"""Decode worker: receives the KV cache of prompts from prefill workers and generates the output tokens.

`baton.decode.wiring.run` starts it. `DecodeWork` is a rank's part of each turn. It drives `ReceivingSide`
of `baton.handover` and carries out its requests: to senders (`prefill_peers`), to the engine
(`decode_scheduler`, `page_check`) and to callers (`decode_service`). The package imports `baton.worker` and
everything below it, but no prefill, bootstrap or API.
"""
