"""The body of /server_info: the engine's decisions with their reasons, limits, load, and acceptance so far."""

import os
import time

from peregrine import __version__
from peregrine.serve.metrics import LOAD
from peregrine.serve.service import Service

PLAIN = (int, float, bool)  # other values of decisions are written as text


def server_info(service: Service) -> dict[str, object]:
    """What the server says about itself."""
    gateway, metrics, settings = service.gateway, service.metrics, service.settings
    engine = gateway.llm.engine
    shape = engine.runner.drafter.shape
    return {
        "version": __version__,
        "model": service.name,
        # sglang-router lists a replica's model by these.
        "model_path": service.name,
        "served_model_name": service.name,
        "phase": service.status.phase,
        "pid": os.getpid(),
        "uptime_s": round(time.time() - service.started, 1),
        "decisions": [
            {"field": d.field, "value": d.value if isinstance(d.value, PLAIN) else str(d.value), "because": d.because}
            for d in gateway.llm.decisions
        ],
        "limits": {
            "max_model_len": engine.limits.max_len,
            "max_rows": gateway.num_rows,
            "max_queue": settings.max_queue,
            "max_prompt": settings.max_prompt,
            "max_body_bytes": settings.max_body_bytes,
            "max_connections": settings.max_connections,
            "num_drafts": engine.limits.num_drafts,
        },
        "draft_shape": {"depth": shape.depth, "width": shape.width, "nodes": shape.nodes},
        "load": {"open": gateway.num_open, **{name: count(engine) for name, (_, count) in LOAD.items()}},
        "acceptance": {
            "rounds": metrics.rounds,
            "drafted": metrics.num_draft_tokens,
            "correct": metrics.correct,
            "correct_by_position": metrics.correct_by_position,
            "accept_length": metrics.accept_length,
        },
        # SGLang's benchmarks look for it here.
        "internal_states": [{"avg_spec_accept_length": metrics.accept_length}],
    }
