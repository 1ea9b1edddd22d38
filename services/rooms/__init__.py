"""What is a room, on either side and at the bootstrap, and which moves exist?

Names in backticks with hyphens, here and everywhere in the code, are invariants: docs/invariants.md says what
each means, what holds it, and which mutant shows that.
"""
