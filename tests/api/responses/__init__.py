"""Tests of OpenAI's Responses API."""
