"""Models that draft: small networks which read what a target model made of a text, and foretell its next tokens.

They know ops and their target's sizes; nothing of how drafts are verified, chosen or scheduled.
"""
