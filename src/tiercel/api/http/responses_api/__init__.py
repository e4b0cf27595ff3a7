"""OpenAI's Responses API: items to a chat, a chat's answer to items and events, and a store that answers are found in.

A request becomes a `ChatRequest`, so that prompts, sampling, tools and constraints are those of chats. Knows no engine
but by `service`. Read `routes` first.
"""
