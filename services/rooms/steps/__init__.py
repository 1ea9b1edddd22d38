"""Choice of the work in a step of the model: costs of positions, prompt chunks on decode, and drafts.

All ranks of a worker choose alike, since the choice follows from outputs and from numbers that they share.
"""
