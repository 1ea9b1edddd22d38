"""Tests of choices, answer streams and prompt echoes."""
