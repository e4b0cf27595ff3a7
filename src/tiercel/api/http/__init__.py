"""The HTTP front end, in OpenAI's shapes: `server` runs it, `app` lists its routes, `service` is what the routes share.

Knows no model and no file of one: what it serves comes as an `EngineFacade`. A request's way: `gate` (key, load) ->
`reading` (body to a checked value) -> `chat` or `completions` (prompt, parameters) -> `service.start` (on a thread:
template, tokens, admission) -> `running` (outputs as they come) -> `sse` or one JSON answer.
"""
