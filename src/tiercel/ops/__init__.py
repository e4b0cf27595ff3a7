"""The op vocabulary: what each op means, what it costs, and how a model's step is recorded, rewritten and placed.

Does not know models, sequences, pages, the compiled core or where weights come from.
"""
