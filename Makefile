# The only commands anyone types. `make demo` and `make test` do all the set-up they need: a build and
# the demo install what they import, in half of the time; the other commands complete the same .venv.
#
#   NO_VENV=1        use the python3 on PATH and install nothing (a GPU machine without network)
#   BACKEND=cpu      cpu | cuda | all; default: cuda where there are a CUDA device and a toolkit that torch fits
#   PUBLISHABLE=1    a build fails where its variant runs here but cannot be published
#   TORCH=2.11.0     another torch than the pinned one, in an environment of its own
#   TORCH_INDEX=URL  another package index for torch, e.g. one that has its smaller CPU builds
#   DEVICE=cuda:1    for test-gpu; cpu for test-dist and bench-dist over gloo
#   JOBS=8           processes at once for test
#   GPU_JOBS=12      processes at once for test-gpu (needs pytest-xdist)
#   SEED=0           of soak and fuzz; STEPS, CALLS and MESHES say how many
#   N=2,4,8          numbers of ranks for test-dist, one of them for bench-dist

ifneq ($(shell uname -s),Linux)
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
$(error optimizer has no compiled variant for $(or $(shell uname -s),this system), and nothing of it runs \
    without one, not even on the CPU. Use Linux: WSL 2 on Windows, a container elsewhere)
endif
endif

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The environment is installed without bytecode, which the first import of a module then keeps: dozens
# of processes import the tests and the tools, in 7 s of a core with it and 17 s without.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv$(if $(TORCH),-torch$(TORCH))
ifdef NO_VENV
PY := python3
CLANG_FORMAT := clang-format
READY :=
DEMO_READY :=
PREBUILD :=
else
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
# Another torch brings the triton it was released with; the interpreter of triton 3.6 fails on numpy 2.4.
OTHER_TORCH = $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' -e 's/^numpy.*/numpy<2.4/')
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# A complete environment serves the demo, too.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.ready-demo)
CLANG_FORMAT := $(VENV)/bin/clang-format
PREBUILD := $(VENV)/prebuild
endif

BACKEND ?=
AUDIT = $(if $(PUBLISHABLE),--publishable)
DEVICE ?= cuda
JOBS ?= 2
N ?= 2
SEED ?= 0
STEPS ?= 10000
CALLS ?= 10000
MESHES ?= 1000
CPP = $(shell find kernels-src torch-ext -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')
STATIC_SUITE = $(shell grep -lE '^pytestmark = pytest.mark.static' tests/test_*.py)
ARTIFACT_SUITE = $(shell grep -rl --include='*.py' 'mark\.artifacts' tests)
SYMM_SUITE := tests/distributed/test_symm.py tests/tensor_parallel/test_tensor_parallel_gpu.py
# No multicast between GPUs: figures on record are without. Read when torch is imported: two ranks on
# one GPU; and all code is there before one waits.
LINKS := TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
SYMM_ENV := $(LINKS) TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 CUDA_MODULE_LOADING=EAGER
DIST_SUITE := tests/distributed/test_shared_step.py tests/distributed/test_unreduced.py
GPU_SUITE := tests/kernels tests/moe tests/orthogonalize tests/optimizers tests/integrations

.PHONY: help setup build prebuilt announce demo check test test-artifacts test-dist test-symm soak fuzz test-gpu sanitize bench bench-dist \
    plots reference publish clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(READY)  ## make .venv with all of the pinned tools

# A build and the demo need nothing of tools/requirements.txt from the line "# The others" on.
$(VENV)/.ready-demo: WANTED = -e '/^. The others/,$$d'

$(VENV)/.ready $(VENV)/.ready-demo: tools/requirements.txt
	$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	$(BASE_PYTHON) -m venv $(VENV)
	sed -e '' $(WANTED) $(OTHER_TORCH) $< > $(VENV)/requirements.txt
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $(VENV)/requirements.txt
	touch $@

build: $(DEMO_READY)  ## compile this device's variant into build/ (BACKEND=cpu|cuda|all)
	$(PY) tools/build_local.py $(if $(BACKEND),--backend $(BACKEND)) $(AUDIT)

$(VENV)/prebuild: tools/requirements-prebuild.txt | $(READY)  # the Triton whose machine code variants bring
	sed -n '/^triton==/,/[^\\]$$/p' $< > $(VENV)/prebuild.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade --target $@ -r $(VENV)/prebuild.txt
	touch $@

prebuilt: $(READY) $(PREBUILD)  ## Triton's machine code for listed layers into the CUDA variants in build/
	$(if $(PREBUILD),PYTHONPATH=$(PREBUILD)) $(PY) tools/prebuild.py $(ARGS)

demo: announce build  ## train a small model with AdamW and with MuonAdamW, show the curves
	$(PY) examples/train_demo.py $(ARGS)

announce:  # what make demo is going to do here, and for how long
	@$(if $(READY),$(BASE_PYTHON),$(PY)) tools/announce_demo.py $(if $(READY),--environment $(DEMO_READY)) $(if $(BACKEND),--backend $(BACKEND))

check: $(READY)  ## lint, format, layering, manifest, Hub rules, sizes (no build)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CPP)
	$(PY) -m pytest -q -p no:cacheprovider $(STATIC_SUITE)
	$(PY) benchmarks/run.py plots --check
	$(PY) tools/reference_pages.py --check
	$(PY) tools/sizes.py

test: $(READY)  ## the CPU variant and the whole CPU suite, README's code included
	$(PY) tools/build_local.py --backend cpu $(AUDIT)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal --expected-skips tests/expected_skips.txt $(ARGS) tests

test-artifacts: $(READY)  ## the part of make test that reads every variant in build/; none of it may be skipped
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m artifacts --expected-skips /dev/null $(ARTIFACT_SUITE)

test-gpu:  ## the same tests on a GPU, with the artifact in build/ (no environment, no network)
	OMP_NUM_THREADS=1 python3 -m pytest -q --device $(DEVICE) -m "not alone" $(if $(GPU_JOBS),-n $(GPU_JOBS) --dist worksteal) \
	    --expected-skips tests/expected_skips_gpu.txt $(ARGS) $(GPU_SUITE)
	python3 -m pytest -q --device $(DEVICE) -m alone $(GPU_SUITE)

test-dist:  ## several ranks equal one: make test-dist N=8 on 8 GPUs, N=4 DEVICE=cpu over gloo
	$(LINKS) $(if $(filter cpu,$(DEVICE)),OMP_NUM_THREADS=1 $(PY),python3) -m pytest -q --device $(DEVICE) --ranks $(N) -k equal $(DIST_SUITE)

test-symm:  ## messages and products through symmetric memory: 2 and 4 processes on the GPUs there are, one is enough (OUT=folder: logs)
	$(SYMM_ENV) OMP_NUM_THREADS=1 OUT="$(OUT)" python3 tools/symm_parts.py -q -rA --durations 9 --device cuda $(ARGS) $(SYMM_SUITE)

soak: $(READY)  ## random events happen to optimizers for STEPS=10000 steps, a tenth of them on four ranks
	STEPS_ALONE=$$(($(STEPS) * 9 / 10)) STEPS_TOGETHER=$$(($(STEPS) / 10)) SEED=$(SEED) OMP_NUM_THREADS=1 \
	    $(PY) -m pytest -q -n 1 --timeout 400 --timeout-method thread -k soak $(ARGS) tests/stress/long_runs.py

fuzz: $(READY)  ## CALLS=10000 random calls of every public function, plans on MESHES=1000 random meshes
	CALLS=$(CALLS) MESHES=$(MESHES) SEED=$(SEED) OMP_NUM_THREADS=1 \
	    $(PY) -m pytest -q -n 1 --timeout 20 --timeout-method thread -o timeout_func_only=true -k fuzz $(ARGS) \
	    tests/stress/long_runs.py

sanitize:  ## compute-sanitizer over the compiled kernels on this GPU, and over a planted bug
	python3 tools/sanitize.py

bench:  ## time one op on this GPU: make bench OP=elementwise (OP=end_to_end ARGS="--case gpt-124M/muon")
	python3 benchmarks/run.py $(or $(OP),$(error say which: make bench OP=elementwise)) $(ARGS)

bench-dist:  ## at most ten minutes on several GPUs, steps and a verdict, or OP=communication, tensor_parallel: make bench-dist N=8 (DEVICE=cpu: a try)
	$(LINKS) OMP_NUM_THREADS=1 $(if $(filter cpu,$(DEVICE)),$(PY),python3) -m torch.distributed.run --standalone --nproc-per-node $(N) \
		benchmarks/run.py $(or $(OP),optimizer_step) --budget $(or $(BUDGET),540) $(if $(filter cpu,$(DEVICE)),--device cpu) $(ARGS)

plots: $(READY)  ## draw README's table, docs/benchmarks and the plots from benchmarks/results
	$(PY) benchmarks/run.py plots

reference:  ## write docs/reference from the docstrings (no environment)
	python3 tools/reference_pages.py

publish: $(READY)  ## upload build/ to the Hub (DRY_RUN=1 lists what would be sent)
	$(PY) tools/publish.py $(if $(DRY_RUN),--dry-run) $(ARGS)

clean:  ## remove what was built
	rm -rf build demo_out
