"""Tests of exchanges: bodies, events, disconnects, logs, metrics."""
