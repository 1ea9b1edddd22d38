"""Prefill worker: computes the KV cache of prompts and writes it into the memory of decode workers.

`baton.prefill.wiring.run` starts it. `PrefillWork` is a rank's part of each turn. It drives `SendingSide`
of `baton.handover` and carries out its requests: to the engine (`prefill_scheduler`), to the transfer
(`transfer_scheduler`, `room_transfer`, `routes`) and to callers and receivers (`prefill_service`,
`handover_stream`). The package imports `baton.worker` and everything below it, but no decode, bootstrap or
API.
"""
