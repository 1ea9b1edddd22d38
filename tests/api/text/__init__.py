"""Tests of templates, tokenizers and detokenizers."""
