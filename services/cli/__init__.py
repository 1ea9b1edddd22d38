"""Commands of `baton`: they parse flags, print results, and call other packages for the rest.

The first import opens the standard streams that the process lacks. Console scripts call `main.main`. Commands
that start processes call `launch`, and the others call a running bootstrap. No other package imports this
one.
"""

from baton.cli.standard_streams import open_missing

open_missing()
