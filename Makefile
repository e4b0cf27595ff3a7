.PHONY: setup check fix test test-all test-models bench table native-test

setup:
	pip install -e '.[test]'

check:
	ruff check .
	ruff format --check .
	mypy
	MYPYPATH=src:examples/tiercel-tier-valkey/src mypy -p tiercel_tier_valkey
	lint-imports
	clang-format --dry-run --Werror $$(git ls-files 'native/*.cpp' 'native/*.hpp')
	typos

fix:
	ruff check --fix .
	ruff format .
	clang-format -i $$(git ls-files 'native/*.cpp' 'native/*.hpp')

test:
	pytest

test-all:
	pytest -m ""

test-models:
	python tools/fetch_test_models.py

bench:
	benchmarks/rows.sh

table:
	tiercel bench table benchmarks/results/*.jsonl --into README.md

native-test:
	cmake -S . -B build/native-test -DTIERCEL_TESTS=ON -DTIERCEL_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/native-test -j 2
	build/native-test/tiercel_tests
