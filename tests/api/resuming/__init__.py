"""Tests of streams that are continued after their connection broke."""
