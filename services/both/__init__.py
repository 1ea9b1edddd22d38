"""One process that is both a prefill and a decode worker, over one set of weights.

`baton.both.wiring.run` starts it. It wires `baton.prefill` and `baton.decode`, and imports nothing above
them.
"""
