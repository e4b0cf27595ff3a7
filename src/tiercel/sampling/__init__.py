"""Logits to a token: the numpy definition of sampling, and the grammars that say which tokens a form allows. Knows
nothing of steps or pages.
"""
