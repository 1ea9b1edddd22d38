"""Plug-ins and tests of the test suite itself: tiers, order, shared fixtures, and rules of style."""
