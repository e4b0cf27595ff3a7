.PHONY: setup check fix test test-all bench native-test

setup:
	pip install -e '.[test]'

check:
	ruff check .
	ruff format --check .
	mypy
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

bench:
	tiercel bench latency --case decode-smollm2 --output benchmarks/results/latency.jsonl
	tiercel bench throughput --case batch32-smollm2 --output benchmarks/results/throughput.jsonl
	tiercel bench startup --case startup-smollm2 --output benchmarks/results/startup.jsonl

native-test:
	cmake -S . -B build/native-test -DTIERCEL_TESTS=ON -DTIERCEL_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/native-test -j 2
	build/native-test/tiercel_tests
