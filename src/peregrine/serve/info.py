"""What a server says about itself: choices with their reasons, limits, load, and how speculation went so far."""

import os
import time

from peregrine import __version__
from peregrine.serve.service import Service


def server_info(service: Service) -> dict[str, object]:
    """The body of /server_info."""
    desk, metrics = service.desk, service.metrics
    engine, settings = desk.llm.engine, service.settings
    shape = engine.runner.drafter.shape
    pool, tree = engine.ledger.pool, engine.ledger.tree
    return {
        "version": __version__,
        "model": service.name,
        "phase": service.phase,
        "pid": os.getpid(),
        "uptime_s": round(time.time() - service.started, 1),
        "decisions": [
            {
                "field": d.field,
                "value": d.value if isinstance(d.value, int | float) else str(d.value),
                "because": d.because,
            }
            for d in desk.llm.decisions
        ],
        "limits": {
            "max_model_len": engine.limits.max_len,
            "max_rows": desk.num_rows,
            "max_queue": settings.max_queue,
            "max_prompt": settings.max_prompt,
            "max_body_bytes": settings.max_body_bytes,
            "num_drafts": engine.limits.num_drafts,
        },
        "draft_shape": {"depth": shape.depth, "width": shape.width, "nodes": shape.nodes},
        "load": {
            "open": desk.num_open,
            "running": len(engine.running),
            "reading": len(engine.reading),
            "waiting": len(engine.waiting),
            "pages": pool.num_pages - 1,
            "pages_free": pool.num_free,
            "pages_cached": tree.num_cached if tree else 0,
        },
        "acceptance": {
            "rounds": metrics.rounds,
            "drafted": metrics.num_draft_tokens,
            "correct": metrics.correct,
            "correct_by_position": metrics.correct_by_position,
            "accept_length": metrics.accept_length,
        },
        # Where SGLang's benchmarks look for it.
        "internal_states": [{"avg_spec_accept_length": metrics.accept_length}],
    }
