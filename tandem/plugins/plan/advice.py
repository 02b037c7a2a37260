"""Out of memory as a user's error: the settings that would save most, and how much."""

from tandem.config.schema import Config
from tandem.plugins.plan.meshes import memory_of_run
from tandem.plugins.plan.resources import Need, Sizes, model_sizes, savings
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError

NAMED = 3  # settings
# it sums gradients in another order, so a run that is under way keeps its value
CHANGES_BITS = "train.tokens_per_microbatch"


def out_of_memory(error: Exception, config: Config, command: str) -> UserError:
    """Make the error of an allocation that failed."""
    sizes = model_sizes(config, command)

    def needs(sizes: Sizes, config: Config) -> list[Need]:
        return memory_of_run(sizes, config, command, config.data.max_prompt_tokens)

    needed = sum(size for _, size, _ in needs(sizes, config))
    settings = [
        f"{setting} saves {human_bytes(size)}"
        + " (in a new run.folder)" * setting.startswith(CHANGES_BITS)
        for setting, size in savings(sizes, config, needs)[:NAMED]
    ]
    return UserError(
        "out of memory",
        where=f"{sizes.place.device}, {config.model.path}",
        found=str(error).strip().partition("\n")[0],
        expected=f"about {human_bytes(needed)} and the passing tensors of a step (tandem plan)",
        next="nothing is lost: the same command goes on from the last checkpoint, with one of "
        + "; ".join(settings),
    )
