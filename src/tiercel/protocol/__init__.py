"""Frozen values that cross between parts: parameters, requests, step plans and results, outputs. Knows no part's insides."""
