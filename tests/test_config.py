"""The config tree: every mistake is named with its key, place and remedy; what is written reads back equal."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import Config, Eval, Run, describe, load_config, to_toml
from tandem.errors import UserError

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


def test_an_empty_recipe_is_the_defaults(tmp_path):
    assert load(tmp_path) == Config()


def test_a_recipe_sets_what_it_names_and_leaves_the_rest(tmp_path):
    config = load(tmp_path, "[rl]\ngroup_size = 4\n[rollout]\nstop = ['x', 'y']\n")
    assert (config.rl.group_size, config.rollout.stop) == (4, ["x", "y"])
    assert config.rl.prompts_per_step == Config().rl.prompts_per_step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rl]\ngrop_size = 4\n", "rl.grop_size (RECIPE): unknown key; did you mean rl.group_size?"),
        ("[train]\nlr = 0.1\n", "train.lr (RECIPE): unknown key; did you mean train."),
        ("[train]\ngroup_size = 4\n", "train.group_size (RECIPE): unknown key; did you mean rl.group_size?"),
        ("[rollot]\ntop_p = 0.5\n", "rollot (RECIPE): unknown key; did you mean rollout?"),
        ("group_size = 4\n", "group_size (RECIPE): unknown key; did you mean rl.group_size?"),
        ("zzzz = 4\n", "zzzz (RECIPE): unknown key; sections are run, model, data,"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_real_one(text, message, tmp_path):
    [line] = mistakes(tmp_path, text)
    assert line.startswith(message.replace("RECIPE", str(tmp_path / "recipe.toml")))


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ("[rl]\ngroup_size = '8'\n", "rl.group_size", "'8'"),
        ("[rl]\ngroup_size = 8.0\n", "rl.group_size", "8.0"),
        ("[rl]\ngroup_size = true\n", "rl.group_size", "True"),
        ("[data]\nshuffle = 1\n", "data.shuffle", "1"),
        ("[run]\nfolder = 3\n", "run.folder", "3"),
        ("[rollout]\nstop = 'x'\n", "rollout.stop", "'x'"),
        ("[rollout]\ntemperature = 0\n", "rollout.temperature", "0"),
        ("[rollout]\ntemperature = nan\n", "rollout.temperature", "nan"),
        ("[train]\nlearning_rate = inf\n", "train.learning_rate", "inf"),
        ("[rollout]\ntop_p = 1.5\n", "rollout.top_p", "1.5"),
        ("[rl]\nadvantage = 'gae'\n", "rl.advantage", "'gae'"),
        ("rl = 3\n", "rl", "3"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named_with_what_was_found(text, key, found, tmp_path):
    [line] = mistakes(tmp_path, text)
    assert line.startswith(f"{key} ({tmp_path / 'recipe.toml'}): found {found}, ")


def test_all_mistakes_are_reported_together_each_with_its_place(tmp_path):
    lines = mistakes(tmp_path, "[rl]\ngrop_size = 4\nclip_low = 2.0\n", "run.seed=-1", "train.schedule=cubic")
    recipe = str(tmp_path / "recipe.toml")
    assert len(lines) == 4
    places = {line.split(" ", 1)[0]: line[line.index("(") + 1 : line.index(")")] for line in lines}
    assert places == {
        "rl.grop_size": recipe, "rl.clip_low": recipe, "run.seed": "command line", "train.schedule": "command line",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("rl.group_size=16", "rl", "group_size", 16),
        ("run.folder=runs/a=b", "run", "folder", "runs/a=b"),
        ("run.folder='quoted'", "run", "folder", "quoted"),
        ("run.folder=", "run", "folder", ""),
        ("data.shuffle=false", "data", "shuffle", False),
        ("train.learning_rate=3e-4", "train", "learning_rate", 3e-4),
        ("rl.kl_coef=1", "rl", "kl_coef", 1.0),
        ('rollout.stop=["a, b", "c"]', "rollout", "stop", ["a, b", "c"]),
        ("rl.advantage=rloo", "rl", "advantage", "rloo"),
    ],
)
def test_an_override_wins_over_the_recipe(override, section, field, value, tmp_path):
    text = "[run]\nfolder = 'from the recipe'\n[data]\nshuffle = true\n[rl]\ngroup_size = 4\n"
    found = getattr(getattr(load(tmp_path, text, override), section), field)
    assert found == value and type(found) is type(value)


def test_the_last_of_two_overrides_of_a_key_wins(tmp_path):
    assert load(tmp_path, "", "run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize("override", ["group_size=8", "rl.group_size", "=8", "rl.=8", ".group_size=8", ""])
def test_an_override_that_cannot_be_read_is_refused_with_an_example(override, tmp_path):
    with pytest.raises(UserError, match="an override cannot be read") as error:
        load(tmp_path, "", override)
    assert error.value.found == override and "rl.group_size=8" in error.value.expected


def test_an_unknown_key_on_the_command_line_is_named_like_one_in_the_recipe(tmp_path):
    for override in ("rl.grop_size=8", "rll.group_size=8", "rl.deep.group_size=8"):
        [line] = mistakes(tmp_path, "", override)
        assert "unknown key; did you mean rl" in line


def test_a_value_where_a_section_belongs_is_a_users_error_with_an_override_too(tmp_path):
    with pytest.raises(UserError, match="a value where a section belongs"):
        load(tmp_path, "rl = 3\n", "rl.group_size=8")


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "dr_grpo", "rloo"])
def test_a_group_needs_two_episodes_to_be_compared(kind, tmp_path):
    [line] = mistakes(tmp_path, f"[rl]\nadvantage = '{kind}'\ngroup_size = 1\n")
    assert line.startswith("rl.group_size:")


def test_keys_that_contradict_each_other_are_all_named(tmp_path):
    lines = mistakes(
        tmp_path, "[rl]\ngroup_size = 1\nprompts_per_step = 10\nminibatches = 4\n[model]\nreference = 'x'\n"
    )
    assert [line.split(":")[0] for line in lines] == ["rl.group_size", "rl.minibatches", "model.reference"]
    assert load(tmp_path, "[rl]\nkl_coef = 0.1\nminibatches = 4\n[model]\nreference = 'x'\n").rl.kl_coef == 0.1


def test_a_missing_recipe_is_a_users_error_that_names_it(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError, match="the recipe does not exist") as error:
            load_config(path, [])
        assert error.value.where == str(path)


@pytest.mark.parametrize("content", [b"[rl\n", b"[rl]\ngroup_size = \n", b"[rl]\n[rl]\n", b"\xff\xfe"])
def test_a_recipe_that_is_not_toml_is_a_users_error_that_names_it(content, tmp_path):
    (tmp_path / "broken.toml").write_bytes(content)
    with pytest.raises(UserError, match="not valid TOML") as error:
        load_config(tmp_path / "broken.toml", [])
    assert error.value.where == str(tmp_path / "broken.toml") and error.value.found


def test_the_next_command_of_an_error_exists(tmp_path):
    with pytest.raises(UserError) as error:
        load(tmp_path, "zzzz = 4\n")
    assert error.value.next == "tandem plan --keys lists every key"


def test_every_default_survives_the_round_trip_through_toml(tmp_path):
    text = to_toml(Config())
    assert load(tmp_path, text) == Config()
    written = {f"{section}.{name}" for section, fields in tomllib.loads(text).items() for name in fields}
    assert written == {key for key, _, _ in describe()}


@given(folder=TEXT, seed=st.integers(0, 2**62), stop=st.lists(TEXT.filter(bool)), temperature=st.floats(1e-300, 1e300))
def test_any_value_survives_the_round_trip_through_toml(folder, seed, stop, temperature):
    tree = Config().model_dump()
    tree["run"] |= {"folder": folder, "seed": seed}
    tree["rollout"] |= {"stop": stop, "temperature": temperature}
    config = Config.model_validate(tree)
    assert Config.model_validate(tomllib.loads(to_toml(config))) == config


def test_every_leaf_has_a_help_and_defaults_that_are_valid_by_themselves():
    leaves = describe()
    assert len({key for key, _, _ in leaves}) == len(leaves) <= 120
    assert all(help_text for _, _, help_text in leaves)
    Config.model_validate(Config().model_dump())  # a default that breaks its own bounds would be found here


def test_a_config_is_frozen():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1
    with pytest.raises(ValueError, match="frozen"):
        config.eval = Eval()
    assert config.run == Run()
