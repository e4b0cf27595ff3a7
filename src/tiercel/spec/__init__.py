"""Speculative decoding: what proposes tokens, how many are worth computing, and what verifying them means. Knows no
request.
"""
