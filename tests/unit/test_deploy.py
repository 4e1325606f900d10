"""What deploy/ holds: its files against their schemas, against this repository, and against the real commands."""

from __future__ import annotations

import copy
import io
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import stack
import typer
import yaml
from dockerfile_parse import DockerfileParser

from sordino.server.metrics import _WATCHED, Metrics
from sordino.shared.auth import TokenFile
from sordino.shared.cli import build
from sordino.shared.tls import make_certificates

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.33", "1.37")
DOCKERFILES = ("Dockerfile.server", "Dockerfile.client", "Dockerfile.dealer")
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))
MANIFESTS = sorted(
    str(path.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"
)
Yaml = dict[str, Any]


def documents(text: str) -> list[Yaml]:
    return [document for document in yaml.safe_load_all(text) if document]


def values(arguments: list[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str] | None = None) -> Yaml:
    """What the real command makes of these arguments, the first being its name; it is not run."""
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    group = typer.main.get_command(build())
    command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    return dict(command.make_context(arguments[0], arguments[1:]).params)


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=DOCKERFILES)
def dockerfile(request: pytest.FixtureRequest) -> DockerfileParser:
    return DockerfileParser(fileobj=io.BytesIO((DEPLOY / request.param).read_bytes()))


def steps(dockerfile: DockerfileParser, instruction: str) -> list[str]:
    return [step["value"] for step in dockerfile.structure if step["instruction"] == instruction]


def test_base_images_have_a_version(dockerfile: DockerfileParser) -> None:
    images = [image for image in dockerfile.parent_images if image != "build"]
    assert len(images) == 2
    assert set(images) == {"python:3.11-slim-trixie"}


def test_copied_sources_are_here_and_reach_the_builder(dockerfile: DockerfileParser) -> None:
    sources = [
        source
        for value in steps(dockerfile, "COPY")
        if not value.startswith("--from=")
        for source in value.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in sources)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set(sources)


def test_extras_exist_and_all_versions_are_pinned(dockerfile: DockerfileParser) -> None:
    commands = [part for value in steps(dockerfile, "RUN") for part in value.split("&&")]
    installs = [command for command in commands if re.search(r"\bpip\b.* install\b", command)]
    assert len(installs) == 3
    assert all(" -c constraints.txt" in command for command in installs)
    [extras] = re.findall(r"\.whl\)\[([a-z,]+)\]", installs[-1])
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def test_image_runs_a_real_command_as_an_ordinary_user(
    dockerfile: DockerfileParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps(dockerfile, "USER")[-1] == "10001:10001"
    assert steps(dockerfile, "STOPSIGNAL") == ["SIGTERM"]
    [entry], [command] = steps(dockerfile, "ENTRYPOINT"), steps(dockerfile, "CMD")
    assert json.loads(entry) == ["tini", "--", "sordino"]
    values(json.loads(command), monkeypatch, {"SORDINO_SERVER": "grpcs://localhost"})
    # What is written at run time is in volumes, so that the rest can be read-only.
    [volumes] = steps(dockerfile, "VOLUME")
    assert dockerfile.envs["HOME"] in json.loads(volumes)
    assert dockerfile.envs["NUMBA_CACHE_DIR"].startswith(dockerfile.envs["HOME"])


def test_no_secret_is_in_an_image(dockerfile: DockerfileParser) -> None:
    named = [
        name for kind in ("ARG", "ENV") for value in steps(dockerfile, kind) for name in re.findall(r"\w+=", value)
    ]
    assert set(named) == {"TORCH_INDEX=", "PATH=", "HOME=", "NUMBA_CACHE_DIR="}


# -- compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def services() -> Yaml:
    """Those of compose.yaml, with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert "${" not in text
    return dict(yaml.safe_load(text)["services"])


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_match_the_schema(name: str) -> None:
    done = check_compose(DEPLOY / name)
    assert done.returncode == 0, done.stdout


def test_the_schema_of_compose_finds_a_wrong_field(tmp_path: Path) -> None:
    broken = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    broken["services"]["server"]["read_onyl"] = True
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump(broken))
    done = check_compose(path)
    assert done.returncode == 1
    assert "read_onyl" in done.stdout


def test_compose_server(services: Yaml, monkeypatch: pytest.MonkeyPatch) -> None:
    server = services["server"]
    options = values(server["command"], monkeypatch)
    assert int(server["stop_grace_period"].removesuffix("s")) > options["grace"]
    assert server["ports"] == ["127.0.0.1:50551:50551"]
    assert options["port"] == 50551
    mounts = {mount["target"]: mount for mount in server["volumes"]}
    assert mounts[str(options["bundle"])]["read_only"]
    assert {str(options["state"]), "/var/cache/sordino"} < set(mounts)
    assert str(options["metrics_port"]) in server["healthcheck"]["test"][-1]
    [target] = yaml.safe_load((DEPLOY / "prometheus/compose.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"] == [f"server:{options['metrics_port']}"]


def test_compose_gateway_is_on_loopback_and_reads_two_files(services: Yaml, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = services["gateway"]
    options = values(gateway["command"], monkeypatch, gateway["environment"])
    assert options["host"] == "127.0.0.1"
    assert gateway["network_mode"] == "host"
    assert "ports" not in gateway
    files = {str(options["ca"]), str(options["token_file"])}
    assert files == {f"/run/secrets/{name}" for name in gateway["secrets"]}
    assert "state" not in str(gateway["volumes"])


def test_every_service_is_hardened_and_of_a_version(services: Yaml) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", service["image"])


# -- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS)
def test_manifests_match_the_schemas(path: str, version: str) -> None:
    for document in documents((KUBERNETES / path).read_text()):
        kubernetes_validate.validate(document, version, strict=True)
        assert document["kind"] != "Secret"


def test_the_schemas_of_kubernetes_find_a_wrong_field() -> None:
    [deployment] = documents((KUBERNETES / "base/deployment.yaml").read_text())
    broken = copy.deepcopy(deployment)
    container = broken["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def workloads(found: list[Yaml]) -> Iterator[Yaml]:
    yield from (document for document in found if document["kind"] in ("Deployment", "StatefulSet"))


def selects(selector: Yaml, workload: Yaml) -> bool:
    return selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def check_pod(workload: Yaml, monkeypatch: pytest.MonkeyPatch) -> Yaml:
    """The options of its server."""
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    options = values([text.replace("$(CPUS)", "1") for text in container["args"]], monkeypatch)
    assert pod["terminationGracePeriodSeconds"] > options["grace"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": options["port"], "metrics": options["metrics_port"]}
    for probe, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "metrics"}
    assert pod["automountServiceAccountToken"] is False
    user = pod["securityContext"]
    assert user["runAsNonRoot"]
    assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"] == 10001
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert {str(options["bundle"]), str(options["state"]), str(options["tls_cert"].parent)} < set(mounts)
    memory = container["resources"]["limits"]["memory"]
    assert int(memory.removesuffix("Gi")) * 1024 > options["encoded_mib"] + options["kv_mib"]
    return options


def check_together(found: list[Yaml]) -> None:
    """Selectors and references fit: each workload has a service, a budget and the policy, each of these a workload."""
    names = {(document["kind"], document["metadata"]["name"]) for document in found}
    assert len(names) == len(found)
    for document in found:
        spec = document["spec"]
        match document["kind"]:
            case "Service":
                chosen = [one for one in workloads(found) if selects(spec["selector"], one)]
                assert chosen
                [port] = spec["ports"]
                assert port["targetPort"] == "grpc"
            case "PodDisruptionBudget":
                assert len([one for one in workloads(found) if selects(spec["selector"]["matchLabels"], one)]) == 1
            case "NetworkPolicy":
                assert all(selects(spec["podSelector"]["matchLabels"], one) for one in workloads(found))
                assert spec["egress"] == []
                open_to_all = [rule for rule in spec["ingress"] if "from" not in rule]
                assert [port["port"] for rule in open_to_all for port in rule["ports"]] == ["grpc"]
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                assert (target["kind"], target["name"]) in names
            case "Deployment" | "StatefulSet":
                assert selects(spec["selector"]["matchLabels"], document)
                assert "serviceName" not in spec or ("Service", spec["serviceName"]) in names


def rendered(overlay: str) -> list[Yaml]:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_base_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kubectl, too."""
    files = sorted(path for folder in ("base", "network") for path in (KUBERNETES / folder).glob("*.yaml"))
    found = [one for path in files if path.name != "kustomization.yaml" for one in documents(path.read_text())]
    check_together(found)
    [deployment] = workloads(found)
    check_pod(deployment, monkeypatch)


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "network"])
def test_overlays_render_and_fit_together(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered(overlay)
    for document in found:
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)
        assert document["metadata"]["namespace"] == "sordino"
    check_together(found)
    for workload in workloads(found):
        check_pod(workload, monkeypatch)


def test_options_in_patches_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kubectl, too."""
    for path in KUBERNETES.rglob("kustomization.yaml"):
        for option in re.findall(r"value: (--[\w-]+=[\w-]+)", path.read_text()):
            values(["serve", "/bundle", option], monkeypatch)


def test_kustomizations_name_files_that_exist() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        for name in yaml.safe_load(path.read_text())["resources"]:
            assert (path.parent / name).exists()


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for overlay, gpus in (("gpu", 1), ("tensor-parallel", 8)):
        [deployment] = workloads(rendered(overlay))
        options = check_pod(deployment, monkeypatch)
        assert options["device"] == "cuda"
        assert options["tensor_parallel"] == gpus
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        assert container["image"].endswith("-cuda")


def test_stages_hold_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = list(workloads(rendered("stages")))
    ranges = sorted(tuple(map(int, check_pod(one, monkeypatch)["layers"].split("-"))) for one in stages)
    assert ranges[0][0] == 0
    assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(ranges))
    selectors = [one["spec"]["selector"]["matchLabels"] for one in stages]
    assert [[selects(selector, one) for one in stages] for selector in selectors] == [[True, False], [False, True]]


def test_two_splits_side_by_side_share_no_pod() -> None:
    old, new = rendered("base"), rendered("next")
    [older], [newer] = workloads(old), workloads(new)
    for found, other in ((old, newer), (new, older)):
        for document in found:
            selector = document["spec"].get("selector", {})
            assert (
                document["kind"] == "NetworkPolicy"
                or not selector
                or not selects(selector.get("matchLabels", selector), other)
            )
    assert not {one["metadata"]["name"] for one in old} & {one["metadata"]["name"] for one in new}
    claims = [
        one["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] for one in (older, newer)
    ]
    assert claims == ["sordino-bundle", "sordino-bundle-next"]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_rules_and_autoscaler_name_real_metrics() -> None:
    metrics = Metrics()
    metrics.watch(**dict.fromkeys(_WATCHED, lambda: 0.0))
    real = {family.name + end for family in metrics.registry.collect() for end in ("", "_total")}
    texts = [path.read_text() for path in (DEPLOY / "prometheus").glob("*.yml")]
    texts.append((KUBERNETES / "base/horizontalpodautoscaler.yaml").read_text())
    named = {name for text in texts for name in re.findall(r"\b(?:sordino|process)_[a-z_]+", text)}
    assert "sordino_queue_depth" in named
    assert named <= real


def test_autoscaler_reads_what_the_adapter_offers() -> None:
    [scaler] = documents((KUBERNETES / "base/horizontalpodautoscaler.yaml").read_text())
    [rule] = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text())["rules"]
    [metric] = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


# -- the real thing --------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def fetch(port: int, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_pods_server_starts_answers_its_probes_and_writes_nothing(
    bundles: Callable[..., Path], services: Yaml, tmp_path: Path
) -> None:
    """The arguments of the Deployment, with other paths and ports: secrets are read-only there."""
    [deployment] = documents((KUBERNETES / "base/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]["containers"][0]
    tokens, port = tmp_path / "tokens", free_port()
    tokens.mkdir()
    token = TokenFile(tokens / "tokens.json").issue("somebody")
    (tokens / ".lock").unlink()
    server = stack.ServerProcess(bundles("llama"), tmp_path)
    make_certificates(server.state, ["127.0.0.1"])
    (server.state / "token").write_text(token)
    before = sorted(tmp_path.rglob("*"))
    real = {
        "$(CPUS)": "1",
        "--state=/etc/sordino/tokens": f"--state={tokens}",
        "/etc/sordino/tls/tls.crt": str(server.state / "server.pem"),
        "/etc/sordino/tls/tls.key": str(server.state / "server.key"),
        "--port=50551": "--port=0",
        "--metrics-port=9464": f"--metrics-port={port}",
        "0.0.0.0": "127.0.0.1",
    }
    arguments = pod["args"][2:]
    for old, new in real.items():
        assert any(old in argument for argument in arguments), old
        arguments = [argument.replace(old, new) for argument in arguments]
    server = stack.ServerProcess(bundles("llama"), tmp_path, arguments=tuple(arguments))
    with server:
        assert server.serves()
        probes = [pod[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
        assert [fetch(port, path)[0] for path in probes] == [200, 200, 200]
        assert fetch(port, "/ready")[0] == 404
        [_, _, *probe] = services["server"]["healthcheck"]["test"]
        command = [sys.executable, *[text.replace("9464", str(port)) for text in probe]]
        assert subprocess.run(command, timeout=30).returncode == 0
        assert server.terminate() == 0
        assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=30).returncode != 0
    own = {tmp_path / "port", tmp_path / "server.log"}
    assert sorted(path for path in tmp_path.rglob("*") if path not in own) == before
