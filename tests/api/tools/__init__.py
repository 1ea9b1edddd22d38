"""Tests of output formats, parsers and constraints."""
