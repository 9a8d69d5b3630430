"""``graphmem web``: a real server, asked over HTTP as other programs ask it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphmem.cli.web import web_command
from graphmem.cli.web.jobs import Limits
from graphmem.units import format_bytes
from tests import places
from tests.fuzz import samples
from tests.support import hostile, onnx_samples

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "graphmem", "web", "--port", str(port), "--upload", "1MiB", "--a-minute", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(places.ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = process.stderr.readline().split()[-1]
    _wait_for(address)
    yield address
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode in (0, 143)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {"path", "status", "seconds"} <= lines[0].keys()


def _wait_for(address: str) -> None:
    for _ in range(300):
        try:
            httpx.get(f"{address}/healthz")
            return
        except httpx.TransportError:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(onnx_samples.save(onnx_samples.perceptron(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sent(server: str, model: Path) -> str:
    told = httpx.post(f"{server}/v1/files", params={"name": "model.onnx"}, content=model.read_bytes())
    assert told.status_code == 201
    return str(told.json()["file"])


def ask(server: str, command: str, **question: Any) -> Any:
    return httpx.post(f"{server}/v1/{command}", json=question, timeout=300)


def test_an_answer_is_that_of_the_command(server: str, sent: str, model: Path) -> None:
    found = ask(server, "analyze", model=sent, batch=4, gpu="T4")
    assert found.status_code == 200
    command = [sys.executable, "-m", "graphmem", "analyze", str(model), "-b", "4", "--gpu", "T4", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, theirs = found.json(), json.loads(done.stdout)
    assert ours.pop("model").endswith(".onnx")
    theirs.pop("model")
    assert ours == theirs
    assert found.headers["X-Command"].startswith("graphmem analyze --batch-size=4 --gpu=T4 -- ")


def test_the_report_of_an_answer_is_a_page_that_reaches_nothing(server: str, sent: str) -> None:
    found = ask(server, "fit", model=sent, gpu="T4", at_most=64)
    assert found.json()["schema"] == "graphmem.fit/1"
    link = found.headers["Link"].split(">")[1].split("<")[1]
    page = httpx.get(f"{server}{link}")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.text.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("command", "question", "words"),
    [
        ("analyze", {"model": "train.py:build"}, "is no model here"),
        ("analyze", {"model": "package.module:build"}, "is no model here"),
        ("analyze", {"model": "/etc/passwd"}, "is no model here"),
        ("analyze", {"model": "hf:../../etc/passwd"}, "is no model here"),
        ("analyze", {"model": "hf:/etc/passwd"}, "is no model here"),
        ("serve", {"model": "/root"}, "is no model here"),
        ("compare", {"before": "/etc/passwd", "after": "/etc/passwd"}, "is no uploaded file"),
        ("replay", {"snapshot": "file:../../etc/passwd"}, "there is no file"),
        ("analyze", {"model": "zoo:gpt2", "optimizer": "os:system"}, "is a name here"),
        ("sweep", {"model": "zoo:gpt2", "vary": ["optimizer=os:system,adamw"]}, "is a name here"),
        (
            "analyze",
            {"model": "zoo:gpt2", "cudnn": "/tmp/libcudnn.so"},
            "no option 'cudnn'; did you mean cuda?; /docs lists",
        ),
        ("analyze", {"model": "zoo:gpt2", "output": "/tmp/x"}, "no option 'output'; /docs lists"),
        ("analyze", {"model": "zoo:gpt2", "batch": "many"}, 'batch is a whole number, not "many"'),
        ("analyze", {"model": "zoo:" + "a" * 400}, "at most 300 characters"),
        ("analyze", {}, "model is missing; give it"),
        ("analyze", {"model": "zoo:gpt2", "bach": 4}, "no option 'bach'; did you mean batch?"),
        ("analyze", {"model": "zoo:gpt2", "batch": None, "training": "yes and no"}, "training is true or false, not"),
        ("analyze", {"model": "zoo:gpt2", "gpu": ["T4"]}, 'gpu is text, not ["T4"]'),
    ],
)
def test_code_paths_and_what_is_not_known_are_refused(
    server: str, command: str, question: dict[str, Any], words: str
) -> None:
    found = ask(server, command, **question)
    assert found.status_code == 422
    assert words in found.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/analyze", '{"model": ', 422, 'is no JSON (Expecting value at character 10); send {"model"'),
        ("POST", "/v1/analyze", "[1]", 422, "the question is no JSON object; send"),
        ("POST", "/v1/analyze", '{"model": "zoo:gpt2", "gpu": "T4", "gpu": "L4"}', 422, "gpu is given more than once"),
        ("POST", "/v1/analyse", "{}", 404, "there is no /v1/analyse; did you mean /v1/analyze?; see /docs"),
        ("GET", "/v1/nothing", None, 404, "there is no /v1/nothing"),
        ("GET", "/v1/analyze", None, 405, "/v1/analyze takes POST, not GET; see /docs"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    server: str, method: str, path: str, body: str | None, status: int, words: str
) -> None:
    found = httpx.request(method, f"{server}{path}", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == status
    assert words in found.json()["error"]


def test_an_error_of_the_command_is_the_error(server: str, sent: str) -> None:
    found = ask(server, "analyze", model=sent, gpu="T5000")
    assert found.status_code == 422
    assert "T5000" in found.json()["error"]


def test_an_option_that_the_command_cannot_read_is_an_error_of_the_question(server: str, sent: str) -> None:
    found = ask(server, "analyze", model=sent, batch=-4)
    assert found.status_code == 422
    assert "-4 is not in the range x>=1" in found.json()["error"]


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "graphmem", "web", "--port", str(port)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    said = f"graphmem: cannot listen on 127.0.0.1, port {port}: Address already in use; give another --port\n"
    assert found.stderr == said


@pytest.mark.slow
def test_a_step_that_fails_on_any_card_has_its_report(server: str) -> None:
    pytest.importorskip("transformers")
    answer = ask(server, "analyze", model="hf:gpt2", batch=1, seq_len=5000, gpu="T4")
    assert answer.status_code == 200
    assert any(one["code"] == "step_fails" for one in answer.json()["diagnostics"])


def test_files_of_other_kinds_and_large_ones_are_refused(server: str) -> None:
    assert httpx.post(f"{server}/v1/files", params={"name": "train.py"}, content=b"x").status_code == 422
    assert httpx.post(f"{server}/v1/files", params={"name": "sft.yaml"}, content=b"x").status_code == 422
    assert httpx.post(f"{server}/v1/files", params={"name": "a.onnx"}, content=b"x" * (2 << 20)).status_code == 413
    parts = (b"x" * 4096 for _ in range(1000))  # of no announced length
    assert httpx.post(f"{server}/v1/files", params={"name": "a.onnx"}, content=parts).status_code == 422
    assert httpx.post(f"{server}/v1/analyze", content=b" " * (2 << 20)).status_code == 413
    parts = (b" " * 4096 for _ in range(1000))
    assert httpx.post(f"{server}/v1/analyze", content=parts).status_code == 413


def test_hostile_files_run_nothing_and_read_nothing_of_the_machine(server: str, tmp_path: Path) -> None:
    secret = tmp_path / "SECRET"
    secret.write_bytes(samples.EXTERNAL_WEIGHTS)
    models = hostile.models((str(secret), f"{'../' * 6}{secret}"))
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        **{name: ("replay", {"snapshot": content}) for name, content in list(hostile.snapshots(tmp_path).items())[::2]},
        **{name: ("analyze", {"batch": 4, "model": content}) for name, content in models.items()},
        **{name: ("analyze", {"model": content}) for name, content in hostile.configurations().items()},
    }
    for name, content in hostile.bombs().items():
        given = {"model": content, "gpu": "RTX-3090", "engine": "llamacpp"}
        questions[name] = ("serve", given) if name.endswith(".gguf") else ("replay", {"snapshot": content})

    def asked(name: str) -> Any:
        command, question = questions[name]
        field, content = next((field, value) for field, value in question.items() if isinstance(value, bytes))
        sent = httpx.post(f"{server}/v1/files", params={"name": name}, content=content)
        return ask(server, command, **{**question, field: sent.json()["file"]})

    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(questions, pool.map(asked, questions), strict=True))
    for name, answer in answers.items():
        assert answer.status_code in (200, 422), name
        assert "bug in graphmem" not in answer.text, name
        if not name.startswith("config"):
            assert answer.status_code == 422, name
    assert not (tmp_path / "gotcha").exists()
    assert httpx.get(f"{server}/healthz").status_code == 200


_IMPATIENT = """
import sys
from graphmem.cli.web import app, patience
patience.Impatient.seconds = 2
patience.WholeQuestions.__init__.__defaults__ = (2,)
from graphmem.cli.main import cli
cli(["web", "--port", sys.argv[1], "--seconds", "4", "--a-minute", "100000"])
"""


def test_clients_that_send_a_byte_a_second_stop_nobody() -> None:
    """Of headers, of a question, of a file: each ends after its time, and others are answered meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(places.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _IMPATIENT, str(port)], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address)
        headers = b"Host: x\r\nContent-Length: 500\r\n\r\n"
        begun = {
            b"GET /heal": b"",
            b"POST /v1/analyze HTTP/1.1\r\n" + headers: b"408",
            b"POST /v1/files?name=a.onnx HTTP/1.1\r\n" + headers: b"408",
        }
        slow = [(socket.create_connection(("127.0.0.1", port)), words) for words in begun for _ in range(30)]
        for connection, words in slow:
            connection.sendall(words)
        for _ in range(6):
            time.sleep(1)
            for connection, _ in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            began = time.monotonic()
            assert httpx.get(f"{address}/healthz", timeout=10).status_code == 200
            assert time.monotonic() - began < 5
        for connection, words in slow:
            connection.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert begun[words] in connection.recv(1 << 12)
            connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def test_a_process_that_is_killed_three_times_is_started_again(server: str, sent: str) -> None:
    def killed() -> int:
        """The number of processes of an analysis that were killed: three."""
        found: set[str] = set()
        for _ in range(3000):
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = entry.read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"--batch-size=37" in words and entry.parent.name not in found:
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    found.add(entry.parent.name)
                    if len(found) == 3:
                        return 3
            time.sleep(0.01)
        return len(found)

    if not Path("/proc/self/cmdline").exists():
        pytest.skip("there is no /proc")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask, server, "analyze", model=sent, batch=37)
        assert pool.submit(killed).result() == 3
        assert asked.result().status_code == 200


def test_what_takes_long_is_a_job_that_can_be_followed_and_cancelled(server: str, sent: str) -> None:
    told = httpx.post(f"{server}/v1/analyze", params={"wait": 0}, json={"model": sent, "batch": 11})
    assert told.status_code == 202
    job = told.json()
    with httpx.stream("GET", f"{server}{job['events']}", timeout=120) as events:
        states = [json.loads(line[6:])["state"] for line in events.iter_lines() if line.startswith("data: ")]
    assert states[-1] == "done"
    assert httpx.get(f"{server}{job['self']}").json()["peak"]["device_bytes"] > 0
    other = httpx.post(f"{server}/v1/analyze", params={"wait": 0}, json={"model": sent, "batch": 12}).json()
    assert httpx.delete(f"{server}{other['self']}").json()["state"] == "cancelled"
    assert httpx.get(f"{server}{other['self']}").status_code == 409
    assert httpx.get(f"{server}/v1/jobs/none").status_code == 404


def test_equal_questions_of_many_clients_are_one_analysis_with_one_answer(server: str, sent: str) -> None:
    def one(number: int) -> Any:
        return ask(server, "analyze", model=sent, batch=1 + number % 4, gpu="L4").json()

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(64)))
    assert all(answers[number] == answers[number % 4] for number in range(64))
    text = httpx.get(f"{server}/metrics").text
    assert 'graphmem_questions_total{command="analyze",remembered="yes"}' in text


def test_the_page_and_the_reference_are_there(server: str) -> None:
    page = httpx.get(f"{server}/")
    assert "How much GPU memory?" in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    reference = httpx.get(f"{server}/openapi.json").json()
    assert set(reference["components"]["schemas"]) >= {"AnalyzeQuestion", "FitQuestion", "PlanQuestion"}
    assert httpx.get(f"{server}/v1/choices").json()["models"][0].startswith("zoo:")


def test_a_client_that_asks_too_often_is_told_when_to_come_back() -> None:
    from fastapi.testclient import TestClient

    from graphmem.cli.web.app import create_app

    with TestClient(create_app(Limits(), a_minute=3)) as client:
        codes = [client.get("/v1/jobs/none").status_code for _ in range(5)]
        assert codes == [404, 404, 404, 429, 429]
        assert client.get("/healthz").status_code == 200


def test_the_image_and_the_space_start_the_service_by_options_that_it_has() -> None:
    image = (places.ROOT / "Dockerfile").read_text()
    (line,) = (line for line in image.splitlines() if line.startswith("CMD"))
    _, *words = json.loads(line.removeprefix("CMD "))
    space = (places.ROOT / "examples" / "space" / "app.py").read_text()
    found = re.search(r"cli\((\[.*\])\)", space)
    assert found is not None
    for given in (words, json.loads(found[1])):
        assert given[0] == "web"
        web_command.make_context("web", list(given[1:]))


@pytest.mark.parametrize("width", [390, 1400])
def test_five_tasks_in_a_browser_have_the_answers_of_the_commands(
    server: str, model: Path, tmp_path: Path, width: int
) -> None:
    """A file is picked, a card and a batch are typed, and the button is pressed, as people do; the sentence holds what
    the answer of the service says, and everything fits the width of the window."""
    webdriver = pytest.importorskip("selenium.webdriver")
    browser, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("there is no Chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromedriver))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        tasks: list[tuple[str, dict[str, str], str]] = [
            ("analyze", {"gpu": "T4", "batch": "4"}, "Fits T4-16GB: needs {device} of device memory"),
            ("analyze", {"batch": "2"}, "Fits H100-80GB (assumed: no card was named): needs {device} of device memory"),
            ("fit", {"gpu": "T4"}, "The largest batch: {largest}"),
            ("advise", {"gpu": "T4", "batch": "8"}, "Fits T4-16GB: needs {device} of device memory"),
            ("serve", {"model": "Llama-3.1-8B", "gpu": "L40S"}, "{tokens} tokens of KV cache"),
        ]
        for ask_for, fields, sentence in tasks:
            said = _asked_in(driver, server, ask_for, fields, None if "model" in fields else model)
            job = driver.find_element("id", "report").get_attribute("src").removesuffix("/report")
            assert said == sentence.format(**_told(httpx.get(job).json()))
            assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
            assert driver.find_element("id", "command").text.startswith(f"graphmem {ask_for} ")
            assert f"ask={ask_for}" in driver.current_url
    finally:
        driver.quit()


def _asked_in(driver: Any, server: str, ask_for: str, fields: dict[str, str], file: Path | None) -> str:
    """The sentence that the page answers with."""
    driver.get(server)
    driver.find_element("css selector", f"input[value={ask_for}]").click()
    if file is not None:
        driver.find_element("id", "file").send_keys(str(file))
    for name, value in fields.items():
        driver.find_element("name", name).send_keys(value)
    driver.find_element("css selector", "button[type=submit]").click()
    for _ in range(1200):
        if said := driver.find_element("id", "verdict").text:
            return str(said)
        time.sleep(0.1)
    raise AssertionError(driver.find_element("id", "state").text)


def _told(answer: dict[str, Any]) -> dict[str, object]:
    """What sentences say of an answer."""
    estimate = answer.get("base") or answer.get("estimate") or answer
    device = estimate.get("peak", {}).get("device_bytes", 0)
    tokens = (answer.get("kv_cache") or {}).get("tokens")
    return {"device": format_bytes(device), "largest": answer.get("largest"), "tokens": tokens}
