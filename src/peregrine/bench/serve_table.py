"""The result of `bench serve` as a table."""

from typing import Any

from peregrine.log import style, visible

COLUMNS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
HEAD = f"{'':>6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}   ms"


def show(result: dict[str, Any]) -> str:
    """Every case with its latencies; failures come first."""
    lines = [
        f"{result['model']} at {result['url']}: {result['requests']} requests per case, "
        f"{result['prompts']} prompts, up to {result['max_tokens']} tokens, temperature {result['temperature']:g}"
    ]
    if result["requests"] > result["prompts"]:
        lines.append("prompts repeat within a case: a server with a prefix cache reads the later ones faster")
    if any(case["tokens_from"] == "chunks" for case in result["cases"]):
        lines.append("the server reports no usage: tokens are counted by chunks, too few where a chunk holds several")
    for case in result["cases"]:
        lines += ["", *show_case(case, result["limits"])]
    return "\n".join(lines)


def show_case(case: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """The lines of one case."""
    lines = [style(title_of(case), "bold")]
    if case["failed"]:
        lines.append(style(f"  {case['failed']} requests failed:", "red"))
        lines += [f"    {count} x {visible(error)}" for error, count in case["errors"].items()]
    lines.append(
        f"  {case['completed']} requests in {case['seconds']:.2f} s: "
        f"{case['output_tokens_per_s']:.1f} tokens/s, {case['requests_per_s']:.2f} requests/s"
    )
    if case["good_requests_per_s"] is not None:
        kept = ", ".join(f"{name.removesuffix('_ms').upper()} <= {value:g} ms" for name, value in limits.items())
        lines.append(
            f"  goodput {case['good_requests_per_s']:.2f} requests/s, {case['good_share']:.0%} of all ({kept})"
        )
    lines.append(f"  {acceptance_line(case['acceptance'])}")
    lines.append(f"  {HEAD}")
    for title, name in COLUMNS:
        figures = case[name]
        written = "".join(f"{figures[key]:10.2f}" for key in ("mean", "p50", "p90", "p99")) if figures else "none"
        lines.append(f"  {title:>6}{written:>10}")
    return lines


def title_of(case: dict[str, Any]) -> str:
    """A case's load in words."""
    return f"{case['concurrency']} at a time" if case["rate"] is None else f"{case['rate']:g} per second"


def acceptance_line(acceptance: dict[str, Any] | None) -> str:
    """Acceptance as one line, if the server publishes it."""
    if acceptance is None:
        return "acceptance: none; the server counted no drafts, or its /metrics could not be read"
    positions = " ".join(f"{share:.2f}" for share in acceptance["by_position"])
    return (
        f"acceptance: {acceptance['accept_length']:.2f} tokens per round (bonus included), "
        f"{acceptance['accept_rate']:.0%} of drafts; by position {positions or '-'}"
    )
