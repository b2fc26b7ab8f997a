"""The server: OpenAI's API over one engine, and batches of the same requests from a file.

protocol      request bodies: the schema of each endpoint, what is honoured and what is refused
job           a body as prompts and sampling parameters for the engine
gateway       admits jobs to the engine's thread and brings their deltas back to the event loop
choices       the choices of a response, from deltas; logprobs: their log-probabilities
responses     response bodies: envelope, choices, usage; events of a stream
streaming     HTTP responses that follow a job to its end, whole or as server-sent events
app           the routes; static_files: the playground and the page of /docs
middleware    API keys, limits on bodies, a count of responses
service       the server's state: loading, ready, draining, faulted
metrics       counters for Prometheus; info: /server_info
errors        errors in OpenAI's format
run           listen, load, serve, drain; settings: ServeConfig
batch         a file of requests; batch_output: the file of their responses
"""
