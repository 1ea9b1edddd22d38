"""Tests of `baton.telemetry`."""
