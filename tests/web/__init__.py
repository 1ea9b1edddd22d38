"""Tests of `baton.web`."""
