"""The server's metrics, as Prometheus text. Knows no HTTP server."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# seconds
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# of Engine.stats
COUNTERS = ("generated_tokens", "prompt_tokens", "prompt_tokens_cached", "preemptions")


class ServerMetrics:
    """The server's own numbers; `text` adds those of the engine."""

    def __init__(self) -> None:
        self._registry, self._stats = CollectorRegistry(), dict[str, float]()
        own: Any = {"namespace": "tandem", "registry": self._registry}
        self.requests = Counter("requests", "Answered requests.", ("path", "status"), **own)
        self.disconnects = Counter("disconnects", "Clients that left before their answer.", **own)
        self.first_token, self.request_time = (
            Histogram(name, f"From a request's arrival to its {end} token.", buckets=BOUNDS, **own)
            for name, end in (("time_to_first_token_seconds", "first"), ("request_seconds", "last"))
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers. Implements prometheus_client's Collector."""
        running = int(bool(self._stats))
        yield GaugeMetricFamily("tandem_engine_up", "Whether the engine runs.", value=running)
        for name, value in self._stats.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            meaning = f"{name.replace('_', ' ').capitalize()} of the engine."
            yield family(f"tandem_{name}", meaning, value=value)

    def text(self, stats: Mapping[str, float]) -> bytes:
        """Write the exposition; stats: of the engine, empty if it has stopped."""
        self._stats = dict(stats)
        return generate_latest(self._registry)
