"""Tests of Anthropic's Messages API."""
