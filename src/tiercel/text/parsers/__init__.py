"""A model's text to what it means: the answer, reasoning apart from it, tool calls. One file a family of models.

It knows text only: no tokens, requests or streams of a client. Every parser takes its text in any pieces and gives the
same events; none raises on what a model wrote: what it cannot read is content. Read `interface`, then `machine`.
"""
