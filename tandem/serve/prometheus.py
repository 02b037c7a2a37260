"""The server's metrics, as Prometheus text (exposition format 0.0.4). Knows no HTTP server."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

# seconds
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# of Engine.stats
COUNTERS = ("generated_tokens", "prompt_tokens", "prompt_tokens_cached", "preemptions")


class Histogram:
    """Seconds, in cumulative buckets."""

    def __init__(self, name: str, meaning: str):
        self._name, self._meaning = name, meaning
        self._counts, self._sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        lines, total = _header(self._name, "histogram", self._meaning), 0
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self._name}_sum {self._sum:.6f}", f"{self._name}_count {total}"]


class ServerMetrics:
    """The server's own numbers; `text` adds those of the engine."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.disconnects = 0
        self.first_token = Histogram(
            "tandem_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.request_time = Histogram(
            "tandem_request_seconds", "From a request's arrival to its last token."
        )

    def text(self, stats: Mapping[str, float]) -> str:
        """Write the exposition; stats: of the engine, empty if it has stopped."""
        name = "tandem_engine_up"
        lines = [*_header(name, "gauge", "Whether the engine runs."), f"{name} {int(bool(stats))}"]
        for name, value in stats.items():
            counts = name in COUNTERS
            full = f"tandem_{name}_total" if counts else f"tandem_{name}"
            meaning = f"{name.replace('_', ' ').capitalize()} of the engine."
            lines += _header(full, "counter" if counts else "gauge", meaning)
            lines.append(f"{full} {value!r}")
        lines += _header("tandem_requests_total", "counter", "Answered requests.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'tandem_requests_total{{path="{path}",status="{status}"}} {count}')
        name = "tandem_disconnects_total"
        lines += _header(name, "counter", "Clients that left before their answer.")
        lines.append(f"{name} {self.disconnects}")
        return "\n".join([*lines, *self.first_token.lines(), *self.request_time.lines()]) + "\n"


def _header(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
