"""Tests of the HTTP API, one folder for each of its packages."""
