"""Tests of chat completions, through their route."""
