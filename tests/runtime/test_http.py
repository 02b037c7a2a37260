"""The HTTP client of runs, where it differs from httpx."""

from tandem.runtime import http


def test_a_socks_proxy_of_the_environment_does_not_end_the_client(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    http._client.__wrapped__()
