"""Logits to a token: the numpy definition of sampling. Knows nothing of requests, steps or pages."""
