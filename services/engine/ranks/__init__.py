"""Exchange between the ranks of one worker within a step: tensors, drawn tokens, scores and page sums.

`process_group` connects the ranks at start. `collectives` is what the rest of the engine sees of it. May
import `sampling`, and no other wing.
"""
