"""Metrics for Prometheus, by vLLM's names, so that its dashboards show this server."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_spec.server.job import Finished, Job
from mlx_spec.server.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """What one server did, in a registry of its own."""

    def __init__(self, model: str) -> None:
        """model: the label of all of them."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", about, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(**self._labels)

        self._first = histogram("time_to_first_token_seconds", "From a request to its first token.", SECONDS)
        self._per_token = histogram("time_per_output_token_seconds", "Of a reply's later tokens.", TOKEN_SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Of reading a prompt.", SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Of a reply's rounds.", SECONDS)

    def observe(self, finished: Finished, job: Job) -> None:
        """Take in a text that ended."""
        statistics = finished.statistics
        self._first.observe(finished.first_token_seconds)
        self._prefill.observe(statistics.prompt_seconds)
        self._decode.observe(statistics.seconds)
        if statistics.tokens:
            self._per_token.observe(statistics.seconds / statistics.tokens)

    def watch(self, worker: Worker) -> None:
        """Tell of a worker whenever somebody asks."""
        self._registry.register(WorkerCollector(worker, self._labels))

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)


class WorkerCollector:
    """Reads a worker's counts when Prometheus asks."""

    def __init__(self, worker: Worker, labels: dict[str, str]) -> None:
        self._worker, self._labels = worker, labels

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters."""
        worker, counts = self._worker, self._worker.counts
        yield self._gauge("num_requests_running", "Texts that are generated.", counts.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their turn.", counts.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache in use, from 0 to 1.", worker.cache_usage)
        yield self._counter("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", counts.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", counts.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", counts.cached_tokens)
        yield self._counter("spec_decode_num_drafts", "Rounds that drafted.", counts.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", counts.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.", counts.accepted_tokens)
        positions = {str(position): count for position, count in enumerate(counts.accepted_by_position)}
        yield self._by_label("spec_decode_num_accepted_tokens_per_pos", "By position.", "position", positions)
        yield self._by_label("request_success", "Ended texts.", "finished_reason", dict(counts.finished))

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter(self, name: str, about: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _by_label(self, name: str, about: str, label: str, values: dict[str, int]) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", about, labels=[*self._labels, label])
        for each, value in values.items():
            metric.add_metric([*self._labels.values(), each], value)
        return metric
