"""Recipes in deploy/: they agree with each other and with the server. `make lint-deploy` has real linters read them."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from peregrine.cli.main import build_parser
from peregrine.serve import run
from peregrine.serve.app import make_app
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PORT = 8000


def parsed(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def drain_seconds(args: list[str]) -> float:
    """The server's, given these arguments after the image's own; a wrong flag ends the test."""
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    given = build_parser().parse_args([*json.loads(entry)[1:], *args])
    assert given.port == PORT
    return float(vars(given).get("drain_seconds", ServeConfig().drain_seconds))


def test_the_image() -> None:
    """Pinned by digest, without root, one stage for CPUs (the last one) and one for GPUs."""
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert [name for _, name in stages] == ["base", "cuda", "cpu"]
    assert re.search(r"@sha256:[0-9a-f]{64}$", stages[0][0])
    assert DOCKERFILE.count("USER 1000") == 2
    assert f"EXPOSE {PORT}" in DOCKERFILE
    assert re.findall(r"http://127.0.0.1:(\d+)/health", DOCKERFILE) == [str(PORT)]


def test_compose_with_prometheus_and_grafana() -> None:
    [compose], [gpu] = parsed("compose.yaml"), parsed("compose.gpu.yaml")
    services = compose["services"]
    assert set(services) == {"peregrine", "prometheus", "grafana"}
    assert set(gpu["services"]) == {"peregrine"}
    assert gpu["services"]["peregrine"]["build"]["target"] == "cuda"
    grace = float(services["peregrine"]["stop_grace_period"].removesuffix("s"))
    assert grace >= drain_seconds(services["peregrine"]["command"]) + run.SHUTDOWN_S + run.GRACE_S
    [scraped] = parsed("prometheus.yml")[0]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"peregrine:{PORT}"]
    for mount in [mount for service in services.values() for mount in service.get("volumes", [])]:
        source = mount.split(":")[0]
        assert not source.startswith(".") or (DEPLOY / source).exists(), source
    [data] = parsed("grafana/provisioning/datasources/prometheus.yml")
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "peregrine.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {data["datasources"][0]["uid"]}


def test_kubernetes() -> None:
    """Probes ask for routes that exist, a pod has time to drain, and selectors find the pods."""
    deployment, service, budget = parsed("kubernetes/peregrine.yaml")
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    routes = make_app(Service("merlin", ServeConfig())).openapi()["paths"]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/health", "liveness": "/livez"}
    assert {*probes.values(), pod["metadata"]["annotations"]["prometheus.io/path"]} <= set(routes)
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    [patch] = parsed("kubernetes/gpu/deployment.yaml")
    [patched] = patch["spec"]["template"]["spec"]["containers"]
    for args in (container["args"], patched["args"]):
        needed = pause + drain_seconds(args) + run.SHUTDOWN_S + run.GRACE_S
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed
    labels = pod["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    assert [*selectors, budget["spec"]["selector"]["matchLabels"]] == [labels] * 3
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    assert (patch["metadata"]["name"], patched["name"]) == (deployment["metadata"]["name"], container["name"])
    assert {mount["name"] for mount in patched["volumeMounts"]} == {
        volume["name"] for volume in patch["spec"]["template"]["spec"]["volumes"]
    }
