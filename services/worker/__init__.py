"""Code that prefill and decode workers share: start-up, the turn loop, and one rank's work in a turn.

The wiring of a side (`baton.prefill.wiring`, `baton.decode.wiring`, `baton.both.wiring`) calls
`run_worker`. It starts the process (`lifecycle`), loads the engine, assembles the rank's ports (`assembly`)
and runs the turn loop (`turn_loop`) until all ranks agree to leave. A turn takes commands from the mailbox,
drives the core (`baton.handover`) and starts engine steps on their own thread. The package imports no side,
no API and no fleet. It knows an engine by `baton.engine_interface` only.
"""
