"""The only file that imports verifiers: the names in use, from the installed generation of two.

CLASSIC: up to 0.2 an environment is a module with `load_environment(**args)`; later ones export a
Taskset, an Env, or both.
"""

from importlib.util import find_spec

CLASSIC = find_spec("verifiers.envs") is not None
# an environment variable that nobody sets: a real key must not be sent along
NO_KEY = "TANDEM_EPISODE_KEY"

if CLASSIC:
    from verifiers import load_environment  # type: ignore[import-not-found, unused-ignore]
    from verifiers.clients import resolve_client  # type: ignore[import-not-found, unused-ignore]
    from verifiers.types import ClientConfig  # type: ignore[import-not-found, unused-ignore]
else:
    import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]
    from verifiers.v1.harnesses.null import NullHarness  # type: ignore[import-not-found, unused-ignore]
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # type: ignore[import-not-found, unused-ignore]
    from verifiers.v1.utils.loaders import env_config_type, environment_class, resolve_env_config  # type: ignore[import-not-found, unused-ignore]

__all__ = [
    "CLASSIC",
    "NO_KEY",
    "ClientConfig",
    "NullHarness",
    "call_mcp",
    "connect_mcp",
    "env_config_type",
    "environment_class",
    "load_environment",
    "resolve_client",
    "resolve_env_config",
    "vf",
]
