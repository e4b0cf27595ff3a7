"""/v1/messages in Anthropic's shapes: `schema` is what a request holds, `as_chat` makes a chat of it, `blocks` puts the
chat's deltas into content blocks, `handlers` answers.

It is a translation and nothing else: what a chat means, limits and constraints included, is decided by the chat's own
modules, and every field that has no counterpart there is refused here.
"""
