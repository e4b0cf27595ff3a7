"""Frozen values that cross between parts: parameters, step plans and results, outputs. Knows no part's insides."""
