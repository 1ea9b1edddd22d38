"""Sampling of tokens from logits: penalties, grammar masks, log-probabilities, drafts and proposals.

An engine calls it in each step: `inference.sampled_results` calls `draft_rows`, which calls `sampler`. Needs
torch, but no model and no engine, so that any engine can use it. May import `engine_interface`, `grammars`
and everything below.
"""
