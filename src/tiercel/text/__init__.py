"""Text to token ids and back: tokenizers, chat templates, the detokenizer, stop strings.

It does not know requests, sequences or the engine; it is given ids and text and gives ids and text. A refusal of a
client's text is a `RequestError`, of a model's file a `ModelFileError`.
"""
