"""The server: OpenAI's API over one engine, and batches of the same requests from a file.

protocol      request bodies: the schema of each endpoint, what is honoured and what is refused
job           a body as prompts and sampling parameters for the engine
gateway       admits jobs to the engine's thread and brings their deltas back to the event loop
workers       threads for what a client may make long, so that the event loop is never held
choices       the choices of a response, from deltas; logprobs: their log-probabilities
responses     response bodies: envelope, choices, usage; events of a stream
streaming     HTTP responses that follow a job to its end, whole or as server-sent events
app           the routes; body_routes: how bodies are parsed; static_files: the playground and the page of /docs
middleware    hosts, API keys, limits on bodies; request_log: a line for every request
connections   limits on connections: their number, the time for a head, the pieces of a body
service       the server's state: loading, ready, draining, faulted
metrics       counters for Prometheus; vllm_names: the same under vLLM's names; info: /server_info
errors        errors in OpenAI's format
run           listen, load, serve, drain, end at a fault; settings: ServeConfig
batch         a file of requests; batch_output: the file of their responses
"""
