"""Tests of fields, their checks, and what requests mean."""
