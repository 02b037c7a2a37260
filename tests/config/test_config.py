"""The config tree: every mistake is named with its key, place and remedy; what is written reads
back equal."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.choices import ENGINE
from tandem.config import schema
from tandem.config.recipe import describe, load_config, to_toml
from tandem.config.schema import SHORTHANDS, Config
from tandem.plugins.plan.origins import origins
from tandem.rl import algorithms
from tandem.rl.algorithms import ALGORITHMS
from tandem.runtime.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # any character but half a surrogate pair


def load(folder, text="", *overrides):
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, list(overrides))


def mistakes(folder, text="", *overrides):
    """The lines of the report, one a mistake."""
    with pytest.raises(UserError) as error:
        load(folder, text, *overrides)
    first, *lines = error.value.what.splitlines()
    assert first == f"the configuration has {len(lines)} mistake{'s' * (len(lines) > 1)}"
    return [line.removeprefix("  - ") for line in lines]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[rl]\ngrop_size = 4\n",
            "rl.grop_size (RECIPE): unknown key; did you mean rl.group_size?",
        ),
        (
            "[train]\ngroup_size = 4\n",
            "train.group_size (RECIPE): unknown key; did you mean rl.group_size?",
        ),
        ("[rollot]\ntop_p = 0.5\n", "rollot (RECIPE): unknown key; did you mean rollout?"),
        ("[rl]\nbeta = 0.1\n", "rl.beta (RECIPE): unknown key; TRL's beta is rl.kl_coef here"),
        ("zzzz = 4\n", "zzzz (RECIPE): unknown key; sections are run, model, data,"),
        (
            "learning_rate = 1e-4\n",
            "learning_rate (RECIPE): unknown key; did you mean train.learning_rate or "
            "critic.learning_rate or sft.learning_rate or preference.learning_rate?",
        ),
    ],
)
def test_an_unknown_key_is_reported_with_the_nearest_one(text, message, tmp_path):
    [line] = mistakes(tmp_path, text)
    assert line.startswith(message.replace("RECIPE", str(tmp_path / "recipe.toml")))


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ("[rl]\ngroup_size = '8'\n", "rl.group_size", "'8'"),
        ("[rl]\ngroup_size = true\n", "rl.group_size", "True"),
        ("[rollout]\nstop = 'x'\n", "rollout.stop", "'x'"),
        ("[rollout]\ntemperature = nan\n", "rollout.temperature", "nan"),
        ("[train]\nlearning_rate = inf\n", "train.learning_rate", "inf"),
        ("[rollout]\nengine = 'sglang'\n", "rollout.engine", "'sglang'"),
        ("[rollout]\nengine = 'http://a/v1,b'\n", "rollout.engine", "'http://a/v1,b'"),
        ("[rollout]\nengine = 'http://a:80a/v1'\n", "rollout.engine", "'http://a:80a/v1'"),
        ("[rl]\nadvantage = 'dr_grpo'\n", "rl.advantage", "'dr_grpo'"),
        ("[rl]\nalgorithm = 3\n", "rl.algorithm", "3"),
        ("[model]\ndevice = 'gpu'\n", "model.device", "'gpu'"),
        ("[rollout]\ndevices = ['cuda:1', 'tpu']\n", "rollout.devices.1", "'tpu'"),
        ("rl = 3\n", "rl", "3"),
    ],
)
def test_a_value_of_a_wrong_type_or_range_is_shown(text, key, found, tmp_path):
    [line] = mistakes(tmp_path, text)
    assert line.startswith(f"{key} ({tmp_path / 'recipe.toml'}): found {found}, ")


def test_all_mistakes_are_reported_together_each_with_its_place(tmp_path):
    lines = mistakes(
        tmp_path, "[rl]\ngrop_size = 4\nclip_low = 2.0\n", "run.seed=-1", "train.schedule=cubic"
    )
    recipe = str(tmp_path / "recipe.toml")
    assert len(lines) == 4
    places = {line.split(" ", 1)[0]: line[line.index("(") + 1 : line.index(")")] for line in lines}
    assert places == {
        "rl.grop_size": recipe,
        "rl.clip_low": recipe,
        "run.seed": "command line",
        "train.schedule": "command line",
    }


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("rl.group_size=16", "rl", "group_size", 16),
        ("run.folder=runs/a=b", "run", "folder", "runs/a=b"),
        ("run.folder=", "run", "folder", ""),
        ("data.shuffle=false", "data", "shuffle", False),
        ("rl.kl_coef=1", "rl", "kl_coef", 1.0),
        ('rollout.stop=["a, b", "c"]', "rollout", "stop", ["a, b", "c"]),
        ("rl.advantage=rloo", "rl", "advantage", "rloo"),
    ],
)
def test_an_override_wins_over_the_recipe(override, section, field, value, tmp_path):
    text = "[run]\nfolder = 'from the recipe'\n[data]\nshuffle = true\n[rl]\ngroup_size = 4\n"
    found = getattr(getattr(load(tmp_path, text, override), section), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("group_size=8", "did you mean rl.group_size=8?"),
        ("rl.group_size", "write rl.group_size=VALUE"),
        ("rl.group_size 8", "write rl.group_size=8"),
        ("rl.group_size rl.epochs=8", "write rl.group_size=VALUE"),
        ("my.py:score", "put a key before it: KEY=my.py:score"),
        *((text, "") for text in ("=8", "rl.=8", ".group_size=8", "")),
    ],
)
def test_a_broken_override_is_refused_with_an_example(override, said, tmp_path):
    with pytest.raises(UserError, match="an override cannot be read") as error:
        load(tmp_path, "", *(words := override.split(" ")))
    assert error.value.found == words[0] and "rl.group_size=8" in error.value.expected
    assert error.value.next.startswith(said)


@pytest.mark.parametrize("text", ["env = 'guess'\nreward = 'my.py:score'\n", ""])
def test_a_section_s_name_alone_stands_for_its_main_key(text, tmp_path):
    overrides = [] if text else ["env=guess", "reward=my.py:score"]
    overrides += ["env.max_turns=3", "env.options.limit=4", "reward.options.score.by=[0.5]"]
    config = load(tmp_path, text, *overrides)
    assert (config.env.name, config.env.max_turns, config.env.options) == ("guess", 3, {"limit": 4})
    assert config.reward.functions == ["my.py:score"]
    assert config.reward.options == {"score": {"by": [0.5]}}
    assert load(tmp_path, to_toml(config)) == config


@pytest.mark.parametrize("section", Config.model_fields)
@pytest.mark.parametrize("value", ["'zzz'", "3", "true", "[1]", "2024-01-01"])
def test_a_value_where_a_section_belongs_is_told_with_the_key_that_takes_it(
    section, value, tmp_path
):
    if section in SHORTHANDS and value in ("'zzz'", "[1]"):
        return  # the value of its main key
    [line] = mistakes(tmp_path, f"{section} = {value}\n")
    assert f", {section} is a section; write [{section}], and " in line
    assert "dictionary" not in line


@pytest.mark.parametrize(
    ("text", "place", "found", "cure"),
    [
        ("[model]\npath = 'a'\n\n[model]\n", ":4", "[model]: ", "once"),
        ("[rl]\nk = 1\nk = 2\n", ":3", "k = 2: ", "once"),
        ("[model]\npath = m\n", ":2", "path = m: ", "quotes"),
        ("[model\n", ":1", "[model: ", ""),
        ("[data]\ntrain = ['a', 'b'\n", "", "Unclosed array", ""),
        ("model:\n  path: m\n", ":1", "model:: ", "YAML"),
        ("- model\n", ":1", "- model: ", "YAML"),
        ('{"model": {"path": "m"}}', ":1", '{"model": ', "JSON"),
        ("\xff", ":1", "\xff: ", "JSON"),
    ],
)
def test_a_mistake_of_toml_is_shown_with_its_line(text, place, found, cure, tmp_path):
    with pytest.raises(UserError, match="not valid TOML") as error:
        load(tmp_path, text)
    assert error.value.where == f"{tmp_path / 'recipe.toml'}{place}"
    assert error.value.found.startswith(found) and cure in error.value.next


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "r.toml").write_text("[run]\nsteps = 3\n", encoding="utf-8-sig")
    assert load_config(tmp_path / "r.toml", []).run.steps == 3
    assert origins(tmp_path / "r.toml", [])["run.steps"].endswith("r.toml:2")


@pytest.mark.parametrize("kind", ["ema", "reinforce_pp", "gae"])
def test_one_episode_is_enough_where_nothing_is_compared(kind, tmp_path):
    assert load(tmp_path, "", f"rl.advantage={kind}", "rl.group_size=1").rl.group_size == 1


def test_keys_that_contradict_each_other_are_all_named(tmp_path):
    text = "[rl]\ngroup_size = 1\nprompts_per_step = 10\nminibatches = 4\n"
    lines = mistakes(tmp_path, text + "[rollout]\nstaleness = 100\n")
    keys = [line.split(":")[0] for line in lines]
    assert keys == ["rl.group_size", "rl.minibatches", "rollout.staleness"]


def contradictions():
    """Read the rows of contradictions.txt: (key, overrides that are wrong, overrides that mend
    them)."""
    _, *rows = Path(__file__).with_name("contradictions.txt").read_text().splitlines()
    for row in rows:
        key, wrong, mended = re.split(" [<>] ", row)
        yield key, wrong.split(), mended.split()


CONTRADICTIONS = list(contradictions())


@pytest.mark.parametrize(
    ("key", "wrong", "mended"),
    CONTRADICTIONS,
    ids=[" ".join(wrong) for _, wrong, _ in CONTRADICTIONS],
)
def test_a_contradiction_is_named_by_its_key(key, wrong, mended, tmp_path):
    [line] = mistakes(tmp_path, "", *wrong)
    given = any(override.startswith((f"{key}=", "reward=env")) for override in wrong)
    place = "command line" if given else tmp_path / "recipe.toml"
    assert re.match(rf"{key}(\.\d)?[: ]", line) and f" ({place})" in line
    load(tmp_path, "", *wrong, *mended)


def test_every_contradiction_is_among_those_tested():
    """In the sections, and in the objects that a name of the config chooses."""
    files = Path(schema.__file__).parents[1].rglob("*.py")
    pattern = r'yield \(?\s*f?"([a-z]+\.[a-z_]+|\{ENGINE\}): '
    keys = [re.findall(pattern, file.read_text()) for file in files]
    there = Counter(key.replace("{ENGINE}", ENGINE) for of_file in keys for key in of_file)
    there += Counter(key for key, _, _ in schema.COUNTS_WITH)
    there += Counter(key for key, *_ in schema.APART)
    there += Counter(f"rl.{setting}" for setting in algorithms.settings_of_parts())
    assert there - Counter(key for key, _, _ in CONTRADICTIONS) == Counter()


def test_a_critic_may_stay_in_a_recipe_whose_algorithm_changes(tmp_path):
    recipe = '[rl]\nalgorithm = "ppo"\n[critic]\npath = "x"\nwarmup_steps = 9\n'
    assert load(tmp_path, recipe, "rl.algorithm=grpo").critic.path == "x"


def test_the_defaults_of_rl_are_the_algorithm_they_name():
    assert ALGORITHMS["grpo"].settings.items() <= Config().rl.model_dump().items()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_fills_in_its_values(name, tmp_path):
    in_file = load(tmp_path, f"[rl]\nalgorithm = '{name}'\n")
    assert in_file == load(tmp_path, "", f"rl.algorithm={name}")
    expected = {**Config().rl.model_dump(), "algorithm": name, **ALGORITHMS[name].settings}
    assert in_file.rl.model_dump() == expected
    assert load(tmp_path, to_toml(in_file)) == in_file


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_override_replaces_the_recipes_algorithm(name, tmp_path):
    expected = load(tmp_path, "", f"rl.algorithm={name}")
    for other in ALGORITHMS:
        resolved = to_toml(load(tmp_path, f"[rl]\nalgorithm = '{other}'\n"))
        assert load(tmp_path, resolved, f"rl.algorithm={name}") == expected


def test_an_algorithm_override_keeps_other_keys_and_overrides(tmp_path):
    text = "[rl]\nalgorithm = 'gspo'\nclip_low = 0.1\nclip_high = 0.1\n"
    text += "prompts_per_step = 6\nkl_coef = 0.2\n"
    for overrides in (
        ["rl.algorithm=dapo", "rl.clip_high=0.4"],
        ["rl.clip_high=0.4", "rl.algorithm=dapo"],
    ):
        rl = load(tmp_path, text, *overrides).rl
        found = rl.algorithm, rl.clip_low, rl.clip_high, rl.max_gen_batches
        assert found == ("dapo", 0.2, 0.4, 8)
        assert (rl.prompts_per_step, rl.kl_coef) == (6, 0.2)
    # no algorithm named: the recipe's stays
    assert load(tmp_path, text, "rl.prompts_per_step=4").rl.clip_low == 0.1


@pytest.mark.parametrize(
    "text", ["data.system=[INST] be brief", "reward.options.regex.pattern=[0-9]+", "data.system={a"]
)
def test_text_with_brackets_is_text_where_the_key_takes_text(text):
    assert text.partition("=")[2] in to_toml(load_config(None, ["reward=regex", text]))


def test_every_default_survives_the_round_trip_through_toml(tmp_path):
    text = to_toml(Config())
    assert load(tmp_path, text) == Config()
    tree = tomllib.loads(text)
    written = {f"{section}.{name}" for section, fields in tree.items() for name in fields}
    assert written == {key for key, _, _ in describe()}


@given(
    folder=TEXT,
    seed=st.integers(0, 2**62),
    stop=st.lists(TEXT.filter(bool)),
    temperature=st.floats(1e-300, 1e300),
)
def test_any_value_survives_the_round_trip_through_toml(folder, seed, stop, temperature):
    tree = Config().model_dump()
    tree["run"] |= {"folder": folder, "seed": seed}
    tree["rollout"] |= {"stop": stop, "temperature": temperature}
    config = Config.model_validate(tree)
    assert Config.model_validate(tomllib.loads(to_toml(config))) == config


def test_every_leaf_has_a_help_and_a_valid_default():
    leaves = describe()
    assert len({key for key, _, _ in leaves}) == len(leaves) <= 164
    assert all(help_text for _, _, help_text in leaves)
    # a default that breaks its own bounds would be found here
    Config.model_validate(Config().model_dump())


def test_an_earlier_name_is_read(tmp_path):
    (tmp_path / "old.toml").write_text(
        "[rollout]\ntensor_parallel = 2\nengine = 'vllm'\nworkers = 1\n"
    )
    config = load_config(tmp_path / "old.toml", ["model.path=m", "data.train=d"])
    assert config.rollout.vllm == {"tensor_parallel_size": 2}
