"""Tests of `baton.launch`."""
