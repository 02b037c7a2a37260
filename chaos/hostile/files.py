"""Files from elsewhere that mean harm, or are broken: model directories, run folders, recipes, data
and templates.

A corpus is a table of (name -> what makes it of a good one). It knows nothing of pytest, nor of
what reads the files.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BRACKETS = "[" * 100_000
DEEP = '{"a": ' * 100_000

WITNESS = """
from pathlib import Path
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
Path({witness!r}).write_text("code of the model directory has run")
"""


def clear(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def changed(file, **values):
    """Change keys of a JSON file; None takes a key away."""

    def change(folder):
        content = json.loads((folder / file).read_text())
        content = {
            name: value for name, value in {**content, **values}.items() if value is not None
        }
        (folder / file).write_text(json.dumps(content))

    return change


def config(**values):
    return changed("config.json", **values)


def written(file, content):
    """Put text or bytes in the place of a file."""

    def write(folder):
        clear(folder / file)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def folder_as(file):
    """Put a directory in the place of a file."""

    def make(folder):
        clear(folder / file)
        (folder / file).mkdir()

    return make


def linked(file, target):
    """Put a symbolic link in the place of a file."""

    def link(folder):
        clear(folder / file)
        (folder / file).symlink_to(target)

    return link


def fifo_as(file):
    """Put a pipe, which nobody will ever write into, in the place of a file."""

    def make(folder):
        clear(folder / file)
        os.mkfifo(folder / file)

    return make


def together(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


def sharded(shard):
    """Replace the weights by an index that names this file as every tensor's."""

    def make(folder):
        (folder / "model.safetensors").rename(folder / "weights")
        names = {"model.norm.weight": shard, "lm_head.weight": shard}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": names})
        )

    return make


def header(**tensors):
    """Weights whose header describes other tensors than there are bytes for."""
    text = json.dumps(tensors).encode()
    return written("model.safetensors", len(text).to_bytes(8, "little") + text)


def pickled(folder):
    """Replace the weights by a pickle that would write a file beside itself."""
    (folder / "model.safetensors").unlink()
    code = f"open({str(folder / 'ran')!r}, 'w').write('')"
    (folder / "pytorch_model.bin").write_bytes(
        b"cbuiltins\nexec\n(S" + repr(code).encode() + b"\ntR."
    )


def remote_code(folder):
    """Python files that the config and the tokenizer name; each leaves a witness when it is
    imported."""
    for name in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(WITNESS.format(witness=str(folder.parent / "ran")))
    config(
        model_type="x_of_elsewhere",
        architectures=["X"],
        auto_map={
            "AutoConfig": "configuration_x.Config",
            "AutoModelForCausalLM": "modeling_x.Model",
        },
    )(folder)
    changed(
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_x.Tokenizer", None]},
        tokenizer_class="Tokenizer",
    )(folder)


MODELS = {
    "remote code": remote_code,
    "a pickle for weights": pickled,
    "an adapter that names a module": written(
        "adapter_config.json",
        '{"peft_type": "LORA", "base_model_name_or_path": "/nowhere", '
        '"megatron_core": "this", "megatron_config": {}}',
    ),
    "quantized": config(quantization_config={"quant_method": "awq", "bits": 4}),
    "quantized by nobody": config(quantization_config={"quant_method": "x_of_elsewhere"}),
    "layers of different shapes": config(per_layer_config={"0": {"hidden_size": 8}}),
    "config of brackets": written("config.json", BRACKETS),
    "config of objects": written("config.json", DEEP),
    "config not UTF-8": written("config.json", b"\xff\xfe\xfd"),
    "config empty": written("config.json", ""),
    "config a list": written("config.json", "[1]"),
    "config a number of 10,000 digits": written(
        "config.json", '{"model_type": "llama", "vocab_size": ' + "9" * 10_000 + "}"
    ),
    "config a directory": folder_as("config.json"),
    "config a dangling link": linked("config.json", "nowhere"),
    "config a pipe": fifo_as("config.json"),
    "config of 20 MB": written(
        "config.json", json.dumps({"model_type": "llama", "a": "x" * 20_000_000})
    ),
    "model type a list": config(model_type=["llama"]),
    "0 heads": config(num_attention_heads=0),
    "0 key/value heads": config(num_key_value_heads=0),
    "key/value heads that do not divide": config(num_key_value_heads=4),
    "-1 layers": config(num_hidden_layers=-1),
    "a billion layers": config(num_hidden_layers=10**9),
    "layers as text": config(num_hidden_layers="2"),
    "a vocabulary of 10^18": config(vocab_size=10**18),
    "16 million tokens that the weights lack": config(vocab_size=10**7, hidden_size=9600),
    "hidden size a list": config(hidden_size=[96]),
    "heads true": config(num_attention_heads=True),
    "infinite eps": config(rms_norm_eps="inf"),
    "activation a list": config(hidden_act=["silu"]),
    "activation os.system": config(hidden_act="os.system"),
    "dtype os": config(dtype="os"),
    "dtype a list": config(dtype=[1]),
    "architectures numbers": config(architectures=[1]),
    "architectures text": config(architectures={"a": 1}),
    "rope a number": config(rope_parameters=5),
    "rope of type list": config(rope_parameters={"rope_type": ["default"]}),
    "rope theta text": config(rope_parameters={"rope_type": "default", "rope_theta": "abc"}),
    "rope without factor": config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "rope factor 0": config(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}
    ),
    "rope for layer types": config(rope_parameters={"full_attention": {"rope_type": "default"}}),
    "labels a number": config(id2label=7),
    "layer types too few": config(model_type="qwen2", layer_types=["full_attention"]),
    "layer types unknown": config(model_type="qwen2", layer_types=["mamba", "full_attention"]),
    "layer types a number": config(model_type="qwen2", layer_types=3),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights empty": written("model.safetensors", b""),
    "weights a directory": folder_as("model.safetensors"),
    "weights a pipe": fifo_as("model.safetensors"),
    "weights a dangling link": linked("model.safetensors", "nowhere"),
    "weights with a header of 2^63": written(
        "model.safetensors", (2**63).to_bytes(8, "little") + b"{}"
    ),
    "weights with a header of brackets": written(
        "model.safetensors", len(BRACKETS).to_bytes(8, "little") + BRACKETS.encode()
    ),
    "weights with a header that is no object": written(
        "model.safetensors", (2).to_bytes(8, "little") + b"[]"
    ),
    "weights that claim 10^30 numbers": header(
        a={"dtype": "F32", "shape": [10**15, 10**15], "data_offsets": [0, 4]}
    ),
    "weights of a negative shape": header(
        a={"dtype": "F32", "shape": [-1, 5], "data_offsets": [0, 4]}
    ),
    "weights of no shape": header(a={"dtype": "F32"}),
    "an index that leaves the directory": sharded("../weights"),
    "an index of another directory": sharded("/etc/passwd"),
    "an index of what is not there": sharded("nowhere.safetensors"),
    "an index of pickles": sharded("weights"),
    "an index of numbers": sharded(5),
    "an index of brackets": together(
        sharded("x"), written("model.safetensors.index.json", BRACKETS)
    ),
    "an index without a map": together(sharded("x"), written("model.safetensors.index.json", "{}")),
    "tokenizer of brackets": written("tokenizer.json", BRACKETS),
    "tokenizer a directory": folder_as("tokenizer.json"),
    "tokenizer empty": written("tokenizer.json", ""),
    "tokenizer config of brackets": written("tokenizer_config.json", BRACKETS),
    "tokenizer config a list": written("tokenizer_config.json", "[]"),
    "tokenizer of added tokens that are none": changed(
        "tokenizer_config.json", added_tokens_decoder={"a": 5}
    ),
    "tokenizer with a number as end": changed("tokenizer_config.json", eos_token=5),
    "generation config of brackets": written("generation_config.json", BRACKETS),
    "generation config a list": written("generation_config.json", "[]"),
    "generation config with an end that is none": written(
        "generation_config.json", '{"eos_token_id": {"a": 1}}'
    ),
    "generation config with ends of text": written(
        "generation_config.json", '{"eos_token_id": ["a"]}'
    ),
    "chat template of parentheses": written("chat_template.jinja", "{{ " + "(" * 50_000 + " }}"),
    "chat template of blocks": written(
        "chat_template.jinja", "{% if 1 %}" * 200 + "{% endif %}" * 200
    ),
    "chat template not UTF-8": written("chat_template.jinja", b"\xff\xfe"),
}


def copied(good: Path, folder: Path, change) -> Path:
    """A copy of the good folder, changed."""
    shutil.copytree(good, folder, symlinks=True)
    change(folder)
    return folder


def manifest(step, change):
    """Change a checkpoint's manifest, and seal it again."""

    def make(folder):
        path = folder / "checkpoints" / f"step_{step:06d}" / "manifest.json"
        body = json.loads(path.read_text())
        del body["sha256_of_the_rest"]
        change(body)
        path.write_bytes(_sealed(body))

    return make


def state(content):
    """Put other bytes in the place of a checkpoint's state, with a manifest that has their hash."""

    def make(folder):
        path = folder / "checkpoints" / "step_000002" / "state.json"
        path.write_bytes(content)
        entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest(2, lambda body: body["files"].update({"state.json": entry}))(folder)

    return make


NEWEST = "checkpoints/step_000002"
RUNS = {  # each is one error
    "lock a pipe": fifo_as("lock"),
    "lock a directory": folder_as("lock"),
    "lock a link": linked("lock", "../precious"),
    "lock a link to a device": linked("lock", "/dev/zero"),
    "lock a dangling link": linked("lock", "../nowhere"),
    "log a link": linked("log.txt", "../precious"),
    "log a directory": folder_as("log.txt"),
    "log a pipe": fifo_as("log.txt"),
    "config of brackets": written("config.toml", "a = " + BRACKETS),
    "config a directory": folder_as("config.toml"),
    "config a pipe": fifo_as("config.toml"),
    "config not UTF-8": written("config.toml", b"\xff"),
    "config without sections": written("config.toml", "a = 1"),
    "command of brackets": written("run.json", BRACKETS),
    "command a list": written("run.json", "[]"),
    "command a pipe": fifo_as("run.json"),
    "command a dangling link": linked("run.json", "nowhere"),
    "machine of brackets": written("machine.json", BRACKETS),
    "machine a list": written("machine.json", "[]"),
    "metrics a directory": folder_as("metrics.jsonl"),
    "metrics a pipe": fifo_as("metrics.jsonl"),
    "metrics a link": together(linked("metrics.jsonl", "../precious")),
    "metrics of brackets": written("metrics.jsonl", BRACKETS + "\n"),
    "metrics of numbers": written("metrics.jsonl", "1\n2\n"),
    "metrics of an infinite step": written("metrics.jsonl", '{"step": 1e999}\n'),
    "metrics of another step": written("metrics.jsonl", '{"step": 1}\n'),
    "metrics not UTF-8": written("metrics.jsonl", b"\xff\xfe\n"),
    "ledger a pipe": fifo_as("ledger.jsonl"),
    "TensorBoard's folder a file": written("tensorboard", "x"),
    "a state of brackets": state(BRACKETS.encode()),
    "a state that is a number": state(b"5"),
    "a state that is not UTF-8": state(b"\xff"),
}
GOES_ON = {  # the run goes on from the step, told where that is not the newest
    "timings a link": (linked("timings.jsonl", "../precious"), 2),
    "manifest of brackets": (written(f"{NEWEST}/manifest.json", BRACKETS), 1),
    "manifest of numbers": (written(f"{NEWEST}/manifest.json", "5"), 1),
    "manifest a directory": (folder_as(f"{NEWEST}/manifest.json"), 1),
    "manifest a pipe": (fifo_as(f"{NEWEST}/manifest.json"), 1),
    "manifest without files": (manifest(2, lambda body: body.pop("files")), 1),
    "manifest without a step": (manifest(2, lambda body: body.pop("step")), 1),
    "manifest of files elsewhere": (
        manifest(2, lambda body: body["files"].update({"../../run.json": {}})),
        1,
    ),
    "manifest of files without hashes": (
        manifest(2, lambda body: body["files"].update({"a": 5})),
        1,
    ),
    "weights a pipe": (fifo_as(f"{NEWEST}/policy.safetensors"), 1),
    "weights a dangling link": (linked(f"{NEWEST}/policy.safetensors", "nowhere"), 1),
    "a checkpoint that is a file": (written("checkpoints/step_000009", "x"), 2),
    "an unfinished checkpoint that is a link": (
        linked("checkpoints/.tmp-step_000003", "../../precious-folder"),
        2,
    ),
    "an unfinished checkpoint that is a file": (written("checkpoints/.tmp-step_000003", "x"), 2),
    "an unfinished config that is a link": (linked(".tmp-run.json", "../precious"), 2),
}


def _sealed(body):
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (
        json.dumps({**body, "sha256_of_the_rest": seal}, sort_keys=True, indent=1).encode() + b"\n"
    )


RECIPES = {  # name -> (TOML, what is given on the command line)
    "lists in lists": ("[rl]\nprompts_per_step = " + "[" * 5_000, ()),
    "tables in tables": ("[env.options]\na = " + "{a = " * 900 + "1" + "}" * 900, ()),
    "lists in lists on the command line": ("", ("data.train=" + "[" * 5_000,)),
    "options in options on the command line": ("", ("env.options." + "a." * 5_000 + "b=1",)),
    "a number of 5,000 digits": ("[rl]\nprompts_per_step = " + "9" * 5_000, ()),
    "a zero character in a path": ('[run]\nfolder = "a\\u0000b"', ()),
    "a zero character in data": ('[data]\ntrain = ["a\\u0000b"]', ()),
    "a zero character in options": ('[env.options]\nfile = "a\\u0000b"', ()),
    "bytes that are no text": ("", ("run.folder=a\udcff",)),
    "not UTF-8": (b"\xff\xfe", ()),
    "not TOML": ("{}", ()),
    "a value for a section": ("rl = 5", ()),
    "a date for a number": ("[rl]\nprompts_per_step = 2020-01-01", ()),
    "a date in options": ("[env.options]\nday = 2020-01-01", ()),
    "infinity for a rate": ("[train]\nlearning_rate = inf", ()),
    "a folder in /proc": ("", ("run.folder=/proc/nope/run",)),
    "a folder of 5,000 letters": ("", ("run.folder=" + "a" * 5_000,)),
    "a folder under a file": ("", ("run.folder=/etc/passwd/run",)),
    "a folder that is a device": ("", ("run.folder=/dev/null",)),
}


def text_file(content):
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def twice(path):
    table = pa.Table.from_arrays(
        [pa.array(["1 + 1 ="]), pa.array(["2"]), pa.array(["3"])], ["prompt", "answer", "answer"]
    )
    pq.write_table(table, path)


ROW = '{"prompt": "1 + 1 =", "answer": "2"}'
DATA = {  # name -> (suffix, what makes it, what is said)
    "a column twice in Parquet": (".parquet", twice, "two columns 'answer'"),
    "Parquet of nothing": (".parquet", text_file(b""), "Parquet"),
    "Parquet of a header": (".parquet", text_file(b"PAR1" + b"\xff" * 64 + b"PAR1"), "Parquet"),
    "a column twice in CSV": (
        ".csv",
        text_file("prompt,answer,answer\n1,2,3\n"),
        "a different name for every column",
    ),
    "a key twice in JSON": (
        ".jsonl",
        text_file(ROW + '\n{"prompt": "1", "answer": "2", "answer": "3"}\n'),
        'answer" twice',
    ),
    "a key twice deep in JSON": (
        ".jsonl",
        text_file(
            '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "answer": "3"}\n'
        ),
        'content" twice',
    ),
    "brackets in JSON": (".jsonl", text_file(BRACKETS), "JSON"),
    "objects in JSON": (".jsonl", text_file(DEEP), "nesting"),
}


BIG = "{% set b = 'x' * 4000000 %}"
DOUBLING = (
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
TWINS = "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 40
MILLIONS = "{% for a in range(99999) %}{% for b in range(99999) %}CODE{% endfor %}{% endfor %}"

TEMPLATES = {
    "ljust": "{{ m.ljust(10**9) | length }}",
    "rjust": "{{ 'a'.rjust(10**9) | length }}",
    "center": "{{ 'a'.center(10**9) | length }}",
    "zfill": "{{ 'a'.zfill(10**9) | length }}",
    "the filter center": "{{ 'a' | center(10**9) | length }}",
    "the filter center of a constant": "{{ 'a' | center(1000000000) | length }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) | length }}",
    "replace": BIG + "{{ b.replace('x', b) | length }}",
    "replace of nothing": BIG + "{{ b.replace('', b) | length }}",
    "the filter replace": BIG + "{{ b | replace('x', b) | length }}",
    "join": BIG + "{{ b.join(b) | length }}",
    "join of a generator": BIG
    + "{{ 'x'.join(range(99999) | map('string') | map('center', 4000)) | length }}",
    "the filter join": BIG + "{{ b | join(b) | length }}",
    "the filter join of a list": BIG + "{{ range(9999) | join(b) | length }}",
    "translate": BIG + "{{ b.translate({120: b}) | length }}",
    "encode and widen": "{{ 'x'.encode().ljust(10**9) | length }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "format with a width": "{{ '{:>1000000000}'.format(1) | length }}",
    "format with a width inside": "{{ '{:>{}}'.format(1, 10**9) | length }}",
    "format with a precision": "{{ '{:.1000000000f}'.format(1.5) | length }}",
    "format again and again": BIG + "{{ ('{0}' * 99999).format(b) | length }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) | length }}",
    "format of a doubling list": DOUBLING + "{{ '{}'.format(n.x) | length }}",
    "percent with a width": "{{ ('%1000000000d' % 1) | length }}",
    "percent with a width from elsewhere": "{{ ('%*d' % (10**9, 1)) | length }}",
    "percent again and again": BIG + "{{ ('%(a)s' * 99999) % {'a': b} | length }}",
    "the filter format": "{{ '%1000000000d' | format(1) | length }}",
    "indent": "{{ ('\\n' * 1000000) | indent(1000000) | length }}",
    "indent by text": BIG + "{{ ('\\n' * 100000) | indent(b) | length }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "power": "{{ (10 ** (10 ** 10)) is odd }}",
    "power of powers": "{% set n = namespace(x=2) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "lists that double": DOUBLING + "{{ n.x }}",
    "lists that double in text": DOUBLING + "{{ (n.x ~ '') | length }}",
    "lists that double as JSON": DOUBLING + "{{ n.x | tojson | length }}",
    "lists that double and are compared": TWINS + "{{ a == b }}",
    "lists that double and are looked for": TWINS + "{{ a in [b] }}",
    "lists that double in a test": TWINS + "{{ a is eq(b) }}",
    "tuples that double as a key": TWINS.replace("[", "(").replace("]", ",)") + "{{ {}[a] }}",
    "views that double": "{% set a = {'x': 1} %}"
    + "{% set a = {'x': a.items(), 'y': a.items()} %}" * 40
    + "{{ a }}",
    "expandtabs by name": "{{ '\\t'.expandtabs(tabsize=10**9) | length }}",
    "division of a number of 16 million bits": BIG.replace("x", "f")
    + "{{ (b | int(base=16)) // 3 }}",
    "the filter trim": "{{ ('a' * 4000000) | trim('b' * 3999999 ~ 'a') }}",
    "arguments that double": "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x }}",
    "a namespace that is printed": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "a list in a list in a list": "{% set n = namespace(x=1) %}{% for i in range(9999) %}"
    "{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "JSON with an indent": "{{ [1] | tojson(indent=10**9) | length }}",
    "JSON with long separators": BIG
    + "{{ (range(9999) | list) | tojson(separators=(b, b)) | length }}",
    "deep JSON with an indent": "{% set n = namespace(x=range(9999) | list) %}"
    "{% for i in range(400) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=100) | length }}",
    "lipsum": "{{ lipsum(n=10**7) | length }}",
    "loops in loops": MILLIONS.replace("CODE", ""),
    "loops in loops with an empty text": MILLIONS.replace("CODE", "{{ '' }}"),
    "loops with a condition that is never so": "{% for a in range(99999) %}"
    "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "loops of calls": MILLIONS.replace("CODE", "{% set x = 'a'.upper() %}"),
    "loops of copies": BIG + MILLIONS.replace("CODE", "{% set x = b[1:] %}"),
    "loops of lists": "{% set b = [1] * 99999 %}" + MILLIONS.replace("CODE", "{% set x = b[1:] %}"),
    "loops of searches": BIG + MILLIONS.replace("CODE", "{% if 'y' in b %}{% endif %}"),
    "loops of comparisons": BIG
    + "{% set c = b + '' %}"
    + MILLIONS.replace("CODE", "{% if b ~ 'x' == c ~ 'x' %}{% endif %}"),
    "loops of tests": BIG + MILLIONS.replace("CODE", "{% if b is upper %}{% endif %}"),
    "loops of filters": BIG + MILLIONS.replace("CODE", "{% set x = b | lower %}"),
    "filters of filters": "{{ range(99999) | map('string') | map('center', 4000) "
    "| map('length') | sum }}",
    "a text stripped of a text": "{{ ('a' * 4000000).strip('b' * 3999999 ~ 'a') }}",
    "a text searched from behind": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 1000000) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}"
    "{% endmacro %}{{ m(60) }}",
    "a loop that calls itself twice": "{% for x in [[1]] recursive %}{% if loop.depth < 60 %}"
    "{{ loop([x]) }}{{ loop([x]) }}{% endif %}{% endfor %}",
    "a block that calls itself twice": "{% block x %}{{ self.x() }}{{ self.x() }}{% endblock %}",
    "many texts that are kept": BIG + "".join(f"{{% set b{i} = b ~ '{i}' %}}" for i in range(3000)),
    "an endless generator": "{{ [1] | map('center', 10**9) | list }}",
    "parentheses": "{{ " + "(" * 20_000 + " }}",
    "nested lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "nested blocks": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "a long source": "{{ messages }}" * 100_000,
    "a number of 10,000 digits": "{{ " + "9" * 10_000 + " }}",
    "another template": "{% include '/etc/passwd' %}",
    "an attribute of Python": "{{ ''.__class__.__mro__ }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "a change of the chat": "{{ messages.append(1) }}",
}
