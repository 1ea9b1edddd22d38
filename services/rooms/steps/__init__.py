"""What goes into a step of the model: costs of positions, prompt chunks on decode, and drafts.

Ranks of a worker choose alike, since all of it follows from outputs and from numbers that they share.
"""
