"""Front ends: they translate what clients send, stream what the engine answers, and refuse what cannot be served.

Knows the engine's client, the tokenizer and the template; knows no model, no runner and no file of one.
"""
