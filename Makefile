# Every target says the seconds of its stages on stderr; stdout is left to what runs.
#
# The Python side runs in a pinned vLLM environment that `make env` makes once and keeps (see
# tools/vllm_env.py). The wheel is built from this checkout and installed there when it differs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

TOPOLOGY ?= dp=1,tp=2:dp=2,tp=1
MODEL ?= gqa
KEEP ?=
JSON ?=
# Of the simulator.
SEEDS ?= 3000
FROM ?= 0
SOAK_S ?= 1800
SEED ?= 1
# More arguments for the demo, pytest, the simulator or the mutants.
ARGS ?=

VLLM_ENV := python3 tools/vllm_env.py
ENV_PYTHON = $(shell $(VLLM_ENV) --print-python)
ENV_BIN = $(dir $(ENV_PYTHON))

# All that a wheel is made of.
SOURCES := $(shell find Cargo.toml Cargo.lock pyproject.toml README.md LICENSE rust python \
	tools/wheel_backend.py -type f -not -name '*.pyc' 2>/dev/null)
WHEEL_STAMP := dist/.built

# $(call stage,NAME,COMMAND): runs it and says how long it took, also when it fails. The shell does
# not stop at a failure inside COMMAND (it is tested by `||`), so its parts are joined by `&&`.
stage = @echo "== $(1)" >&2; begun=$$SECONDS; status=0; { $(2); } || status=$$?; \
	echo "== $(1): $$((SECONDS - begun)) s" >&2; exit $$status

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  TOPOLOGY=$(TOPOLOGY) MODEL=gqa|mla|mla-dense|FOLDER KEEP=1 JSON=FILE for demo;"
	@echo "  ARGS for demo and the pytest targets"

.PHONY: needs
needs: ## Say what demo and test take (disk, minutes, system packages), and check it
	$(call stage,needs,$(VLLM_ENV) --needs)

.PHONY: env
env: ## Make the pinned vLLM environment, or find it again
	$(call stage,env,$(VLLM_ENV) >/dev/null)

.PHONY: wheel
wheel: $(WHEEL_STAMP) ## Build the wheel into dist/

$(WHEEL_STAMP): $(SOURCES) | env
	$(call stage,wheel,rm -rf dist && "$(ENV_PYTHON)" -m pip wheel --quiet --no-deps \
		--disable-pip-version-check --wheel-dir dist . >&2 && touch $@)

# The environment notes which wheel it has, so that an unchanged one is not installed again.
.PHONY: install-env
install-env: env wheel ## Install the wheel into the vLLM environment
	$(call stage,install-env,python="$(ENV_PYTHON)" && \
		noted="$$(dirname "$$python")/../hetero_kv_wheel.sha256" && \
		wanted=$$(sha256sum dist/*.whl | cut -d' ' -f1) && \
		{ [ "$$(cat "$$noted" 2>/dev/null)" = "$$wanted" ] || { rm -f "$$noted" && \
		"$$python" -m pip install --quiet --no-deps --force-reinstall \
			--disable-pip-version-check dist/*.whl >&2 && echo "$$wanted" > "$$noted"; }; })

.PHONY: demo
demo: needs install-env ## Prefill and decode on real vLLM engines of unlike layouts, proven
	$(call stage,demo,"$(ENV_PYTHON)" -m hetero_kv.demo --topology '$(TOPOLOGY)' \
		--model '$(MODEL)' $(if $(KEEP),--keep) $(if $(JSON),--json '$(JSON)') $(ARGS))

# Status 3: this machine cannot have it, and has been told why; the tests of `mori` then skip.
.PHONY: mori-env
mori-env: env ## Make the environment of AMD's MoRI-IO over its stand-ins, where it can be had
	$(call stage,mori-env,"$(ENV_PYTHON)" tools/mori_env.py >/dev/null || test $$? = 3)

.PHONY: test
test: needs install-env mori-env test-cargo ## cargo tests, and pytest with a small part on real engines
	$(call stage,pytest,"$(ENV_PYTHON)" -m pytest -m 'not matrix' $(ARGS) tests)

.PHONY: test-vllm
test-vllm: needs install-env ## All tests on real vLLM engines
	$(call stage,pytest on real engines,"$(ENV_PYTHON)" -m pytest $(ARGS) tests/vllm tests/engines)

.PHONY: test-cargo
test-cargo: ## cargo tests only; needs neither Python nor vLLM
	$(call stage,cargo test,if cargo nextest --version >/dev/null 2>&1; \
		then cargo nextest run --release --locked && cargo test --release --locked --doc \
			-p hetero-kv-core -p hetero-kv-transport; else cargo test --release --locked; fi)

# The wheel of this checkout, whatever the environment has installed.
.PHONY: test-rdma
test-rdma: env wheel ## The RDMA transport on Soft-RoCE in a small machine, and what else needs RDMA
	$(call stage,rdma,python3 tools/test_rdma.py --wheel dist/*.whl --python "$(ENV_PYTHON)" $(ARGS))

# Status 77: something was skipped, and a line says which toolchain or component is missing.
.PHONY: sanitize
sanitize: ## Tests under AddressSanitizer, ThreadSanitizer and Miri (needs a nightly toolchain)
	$(call stage,sanitize,python3 tools/sanitize.py $(ARGS))

.PHONY: fuzz
fuzz: ## The proxy's parsers under libFuzzer, a minute each (needs a nightly toolchain and g++)
	$(call stage,fuzz,python3 tools/fuzz.py $(ARGS))

.PHONY: soak
soak: ## The proxy under load while workers die, come, go and change: SOAK_S=1800 SEED=1 (tests: 60 s)
	$(call stage,soak,HETERO_KV_SOAK_S=$(SOAK_S) HETERO_KV_SOAK_SEED=$(SEED) cargo test \
		--release --locked -p hetero-kv-proxy --test soak -- --nocapture $(ARGS))

.PHONY: sim
sim: ## Simulate clusters: SEEDS=100000 FROM=0 for more seeds than the tests run
	$(call stage,simulator,cargo run --release --locked --quiet -p hetero-kv-sim -- \
		--seeds $(SEEDS) --from $(FROM) $(ARGS))

.PHONY: mutants
mutants: ## Break the code on purpose, patch by patch: the simulator has to notice each
	$(call stage,mutants,python3 tools/mutants.py $(ARGS))

.PHONY: lint
lint: install-env ## fmt, clippy, ruff, mypy, stubtest; generated pages and tables of tests are true
	$(call stage,cargo fmt,cargo fmt --all --check)
	$(call stage,clippy,cargo clippy --release --locked --workspace --all-targets -- -D warnings)
	$(call stage,ruff,"$(ENV_BIN)ruff" check . && "$(ENV_BIN)ruff" format --check .)
	$(call stage,mypy,"$(ENV_BIN)mypy")
	$(call stage,stubtest,"$(ENV_PYTHON)" -m mypy.stubtest hetero_kv._core)
	$(call stage,generated pages,(for page in tools/gen_*.py; do "$(ENV_PYTHON)" "$$page" --check || exit; done))
	$(call stage,verbs bindings,tools/gen_verbs_bindings.sh --check)
	$(call stage,tables,"$(ENV_PYTHON)" tests/check_tables.py)
	$(call stage,names,"$(ENV_PYTHON)" tests/check_names.py)

.PHONY: deny
deny: ## Licences, sources and banned crates of all that is linked (needs cargo-deny)
	$(call stage,deny,if cargo deny --version >/dev/null 2>&1; \
		then cargo deny --locked check bans licenses sources; \
		else echo "cargo-deny is missing: cargo install --locked cargo-deny" >&2; exit 1; fi)

.PHONY: bench
bench: install-env ## Benchmarks; what each answers is in benches/README.md
	$(call stage,bench of the planner,cargo bench --locked -p hetero-kv-core --bench plan)
	$(call stage,bench of the proxy's decision,cargo bench --locked -p hetero-kv-proxy --bench decision)
	$(call stage,benches,(worst=0; for bench in benches/*.py; do \
		"$(ENV_PYTHON)" "$$bench" $(ARGS) || worst=$$?; done; exit $$worst))

.PHONY: docs
docs: install-env ## Write the pages of docs/ that are generated from the code
	$(call stage,docs,(for page in tools/gen_*.py; do "$(ENV_PYTHON)" "$$page" || exit; done))
