"""Metrics of a run over HTTP on the loopback interface: Prometheus text, and the events as JSON lines."""

import threading
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from danlu.spec.event import EvaluationEvent, Event, SaveEvent, StartEvent, StepEvent, WarningEvent

MAX_EVENTS = 10_000
"""Newest events that the feed keeps; all of them are in `events.jsonl`."""
_LOOPBACK_NAMES = ("127.0.0.1", "localhost")


class RunMetrics:
    """What the server tells of a run; written by the thread that trains, read by those that answer."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, tuple[str, float]] = {}
        self._events: deque[tuple[int, str]] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._tokens = self._skipped = self._warnings = 0

    def add(self, event: Event) -> None:
        """Take an event of the run."""
        with self._lock:
            self._count += 1
            self._events.append((self._count, event.model_dump_json()))
            self._update(event)

    def _update(self, event: Event) -> None:
        def gauge(name: str, value: float, about: str) -> None:
            self._gauges[name] = (about, value)

        match event:
            case StartEvent():
                gauge("steps", event.steps, "Steps of the recipe.")
                gauge("ranks", event.world, "Ranks of the run.")
                gauge("parameters", event.parameters, "Parameters of the model.")
                gauge("peak_flops", event.peak, "Peak FLOP/s of all ranks that MFU is computed against.")
            case StepEvent():
                self._tokens += event.tokens
                self._skipped += not event.committed
                gauge("step", event.step, "Steps done.")
                gauge("loss", event.loss, "Training loss of the newest step.")
                gauge("gradient_norm", event.norm, "Global gradient norm before clipping.")
                gauge("learning_rate", event.learning_rate, "Learning rate.")
                gauge("step_seconds", event.seconds, "Seconds of the newest step.")
                gauge("tokens_per_second", event.tokens / event.seconds, "Tokens per second of the newest step.")
                gauge("memory_bytes", event.memory, "Largest memory of any rank so far.")
                for ahead, loss in enumerate(event.mtp_losses or (), start=2):
                    gauge(f'mtp_loss{{ahead="{ahead}"}}', loss, "Loss of a module of multi-token prediction.")
                if event.imbalance is not None:
                    gauge("expert_imbalance", event.imbalance, "Load of the busiest expert over the mean.")
                if event.all_to_all_seconds is not None:
                    gauge("all_to_all_seconds", event.all_to_all_seconds, "Of the newest step, mean of all ranks.")
                for level, sent in (event.traffic or {}).items():
                    about = "Bytes that all ranks sent over a level of the network in the newest step."
                    gauge(f'traffic_bytes{{level="{_escape(level)}"}}', sent, about)
            case EvaluationEvent():
                for name, loss in event.losses.items():
                    gauge(f'held_out_loss{{data="{_escape(name)}"}}', loss, "Loss on held-out data.")
            case SaveEvent():
                gauge("checkpoint_step", event.step, "Step of the newest checkpoint.")
                gauge("checkpoint_time_seconds", event.time, "When it was complete, in seconds since the epoch.")
            case WarningEvent():
                self._warnings += 1

    def prometheus_text(self) -> str:
        """All metrics in Prometheus' text format, each with the run's name."""
        with self._lock:
            gauges = dict(self._gauges)
            counters: dict[str, tuple[str, float]] = {
                "tokens_total": ("Tokens of this start's steps.", self._tokens),
                "skipped_steps_total": ("Steps of this start whose update was not applied.", self._skipped),
                "warnings_total": ("Warnings of this start.", self._warnings),
            }
        lines: list[str] = []
        described: set[str] = set()
        for kind, metrics in (("gauge", gauges), ("counter", counters)):
            for key, (about, value) in metrics.items():
                name, _, labels = key.partition("{")
                if name not in described:
                    described.add(name)
                    lines += [f"# HELP danlu_{name} {about}", f"# TYPE danlu_{name} {kind}"]
                run = f'run="{_escape(self._run)}"'
                lines.append(f"danlu_{name}{{{run}{',' + labels if labels else '}'} {_number(value)}")
        return "\n".join(lines) + "\n"

    def events_after(self, number: int) -> str:
        """Events after the `number`-th as JSON lines; older ones than the newest `MAX_EVENTS` are gone."""
        with self._lock:
            return "".join(f"{line}\n" for count, line in self._events if count > number)

    @property
    def event_count(self) -> int:
        """Events so far."""
        with self._lock:
            return self._count


class MetricsServer:
    """Serves a run's metrics to this host alone; the process ends without waiting for it."""

    def __init__(self, run: str, port: int) -> None:
        """Raises `OSError` if the port cannot be had."""
        self.metrics = RunMetrics(run)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self.metrics))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def add(self, event: Event) -> None:
        """Take an event of the run."""
        self.metrics.add(event)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()


def _handler(metrics: RunMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer one request; a site that had its own name resolved to loopback in a browser gets nothing."""
            if self.headers.get("Host", "").rpartition(":")[0] not in _LOOPBACK_NAMES:
                self._answer(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost, with the port\n")
                return
            url = urlsplit(self.path)
            after = parse_qs(url.query).get("after", ["0"])[0]
            if url.path == "/metrics":
                self._answer(HTTPStatus.OK, metrics.prometheus_text(), "text/plain; version=0.0.4; charset=utf-8")
            elif url.path == "/events" and after.isdigit():
                count = metrics.event_count
                self._answer(HTTPStatus.OK, metrics.events_after(int(after)), "application/x-ndjson", count)
            elif url.path == "/events":
                self._answer(HTTPStatus.BAD_REQUEST, "after must be a number of events, such as /events?after=100\n")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "there are /metrics and /events?after=N\n")

        def _answer(
            self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8", count: int | None = None
        ) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if count is not None:
                self.send_header("Danlu-Events", str(count))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Requests do not belong into a rank's log."""

    return Handler


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
