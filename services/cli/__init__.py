"""The commands. What is imported of them first gives the process the standard streams that it lacks."""

from baton.cli.standard_streams import open_missing

open_missing()
